/* File operations below one folder, recorded or made to fail; loaded with LD_PRELOAD.
 *
 * crash_start(folder, log) records every change below the folder in the file `log`: one line of text, then its bytes.
 * An open file is named by the path that it has now; one that has been deleted is left out.
 * crash_arm(n, fault, sticky) lets the n-th counted operation from now on fail; a sticky fault stays, but for removals.
 * fsync is recorded and left out: the model of the disk decides what it keeps. Operations that do not pass through libc
 * are not seen; recording.py compares the replayed tree with the real one, so that a gap is an error.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { NONE, FULL, BROKEN, INTERRUPTED, SHORT }; /* ENOSPC, EIO, EINTR, half of a write */
enum { OTHER, FILE_, FOLDER };

static char root[PATH_MAX];
static size_t root_length;
static int log_fd = -1;
static long count = 0, at = 0;
static int fault = NONE, is_sticky = 0;
static char hit[PATH_MAX + 64];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void crash_start(const char *folder, const char *log) {
    strncpy(root, folder, sizeof root - 1);
    root_length = strlen(root);
    if (*log) {
        int fd = syscall(SYS_openat, AT_FDCWD, log, O_CREAT | O_TRUNC | O_WRONLY | O_APPEND, 0600);
        log_fd = fcntl(fd, F_DUPFD_CLOEXEC, 800);
        close(fd);
    }
}
void crash_stop(void) {
    at = root_length = 0;
    if (log_fd >= 0) close(log_fd);
    log_fd = -1;
}
void crash_arm(long n, int kind, int sticky) {
    count = 0, at = n, fault = kind, is_sticky = sticky, hit[0] = 0;
}
const char *crash_hit(void) { return hit; }

/* Append a record: its size, tab-separated words, then the bytes. */
static void put(const void *data, size_t size, const char *format, ...) {
    if (log_fd < 0) return;
    char line[3 * PATH_MAX];
    va_list words;
    va_start(words, format);
    int n = snprintf(line, 32, "%zu\t", size);
    n += vsnprintf(line + n, sizeof line - n - 2, format, words);
    va_end(words);
    line[n++] = '\n';
    pthread_mutex_lock(&lock);
    syscall(SYS_write, log_fd, line, n);
    if (size) syscall(SYS_write, log_fd, data, size);
    pthread_mutex_unlock(&lock);
}
void crash_mark(const char *text) { put(NULL, 0, "mark\t%s", text); }

static int is_below(const char *path) {
    return root_length && !strncmp(path, root, root_length) && (path[root_length] == '/' || !path[root_length]);
}
/* Absolute path of (folder, path), its folder without links; return whether it lies below the root. */
static int below(int folder_fd, const char *path, char *out) {
    if (!root_length || !path) return 0;
    char full[PATH_MAX * 2], folder[PATH_MAX] = "", link[64] = "/proc/self/cwd";
    if (path[0] != '/') {
        if (folder_fd != AT_FDCWD) snprintf(link, sizeof link, "/proc/self/fd/%d", folder_fd);
        ssize_t n = readlink(link, folder, sizeof folder - 1);
        if (n < 0) return 0;
        folder[n] = 0;
    }
    snprintf(full, sizeof full, "%s/%s", folder, path);
    size_t length = strlen(full);
    while (length > 1 && full[length - 1] == '/') full[--length] = 0;
    char *slash = strrchr(full, '/');
    *slash = 0;
    if (!realpath(*full ? full : "/", folder)) return 0;
    if (snprintf(out, PATH_MAX, "%s/%s", folder, slash + 1) >= PATH_MAX) return 0;
    return is_below(out);
}
/* Kind of an open file below the root, with its path; OTHER for any other. */
static int open_below(int fd, char *out) {
    if (!root_length || fd == log_fd) return OTHER;
    char link[64];
    struct stat status;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, out, PATH_MAX - 1);
    if (n <= 0) return OTHER;
    out[n] = 0;
    if (!is_below(out) || syscall(SYS_fstat, fd, &status) || !status.st_nlink) return OTHER;
    return S_ISREG(status.st_mode) ? FILE_ : S_ISDIR(status.st_mode) ? FOLDER : OTHER;
}
/* Type and permissions of a file or folder, 0 if there is none. */
static mode_t mode_of(const char *path) {
    struct stat status;
    return syscall(SYS_newfstatat, AT_FDCWD, path, &status, AT_SYMLINK_NOFOLLOW) ? 0 : status.st_mode;
}
/* Count an operation; return 0 to go on, -1 with errno to fail, 1 for a short write. */
static int strike(const char *what, const char *path) {
    if (!at || (fault != BROKEN && !strcmp(what, "open to read"))) return 0;
    long n = __sync_add_and_fetch(&count, 1);
    if (n < at || (n > at && !is_sticky)) return 0;
    if (is_sticky && (!strcmp(what, "unlink") || !strcmp(what, "rmdir"))) return 0;
    if (!hit[0]) snprintf(hit, sizeof hit, "%s %s", what, path);
    if (fault == SHORT) return !strcmp(what, "write");
    if (fault == INTERRUPTED && strcmp(what, "write") && strcmp(what, "open") && strcmp(what, "fsync")) return 0;
    errno = fault == INTERRUPTED ? EINTR : fault == FULL ? ENOSPC : EIO;
    return -1;
}

static int open_file(int folder, const char *path, int flags, mode_t mode) {
    char full[PATH_MAX];
    int writes = (flags & O_ACCMODE) != O_RDONLY || (flags & (O_CREAT | O_TRUNC));
    if (!below(folder, path, full)) return syscall(SYS_openat, folder, path, flags, mode);
    if (strike(writes ? "open" : "open to read", full) < 0) return -1;
    int is_new = !mode_of(full), fd = syscall(SYS_openat, folder, path, flags, mode), error = errno;
    if (fd >= 0 && writes && open_below(fd, full) == FILE_) {
        if (is_new) put(NULL, 0, "create\t%s", full);
        else if (flags & O_TRUNC) put(NULL, 0, "truncate\t%s\t0", full);
    }
    errno = error;
    return fd;
}
#define MODE                                  \
    mode_t mode = 0;                          \
    if (flags & (O_CREAT | O_TMPFILE)) {      \
        va_list words;                        \
        va_start(words, flags);               \
        mode = va_arg(words, int);            \
        va_end(words);                        \
    }
int open(const char *path, int flags, ...) { MODE return open_file(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE return open_file(AT_FDCWD, path, flags | O_LARGEFILE, mode); }
int openat(int folder, const char *path, int flags, ...) { MODE return open_file(folder, path, flags, mode); }
int openat64(int folder, const char *path, int flags, ...) { MODE return open_file(folder, path, flags, mode); }

/* Write at an offset, or at the file's own place where that is -1. */
static ssize_t write_at(int fd, const void *data, size_t size, off_t offset) {
    char path[PATH_MAX];
    int is_file = open_below(fd, path) == FILE_, found = is_file ? strike("write", path) : 0;
    if (found < 0) return -1;
    if (found > 0 && size > 1) size /= 2;
    ssize_t done = offset < 0 ? syscall(SYS_write, fd, data, size) : syscall(SYS_pwrite64, fd, data, size, offset);
    int error = errno;
    if (is_file && done > 0)
        put(data, done, "write\t%s\t%lld", path, (long long)(offset < 0 ? lseek(fd, 0, SEEK_CUR) - done : offset));
    errno = error;
    return done;
}
ssize_t write(int fd, const void *data, size_t size) { return write_at(fd, data, size, -1); }
ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) { return write_at(fd, data, size, offset); }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) { return write_at(fd, data, size, offset); }
int ftruncate(int fd, off_t size) {
    char path[PATH_MAX];
    int is_file = open_below(fd, path) == FILE_;
    if (is_file && strike("truncate", path) < 0) return -1;
    int failed = syscall(SYS_ftruncate, fd, size);
    if (!failed && is_file) put(NULL, 0, "truncate\t%s\t%lld", path, (long long)size);
    return failed;
}
int ftruncate64(int fd, off_t size) { return ftruncate(fd, size); }
int truncate(const char *path, off_t size) {
    int fd = open(path, O_WRONLY);
    if (fd < 0) return -1;
    int failed = ftruncate(fd, size);
    close(fd);
    return failed;
}
int truncate64(const char *path, off_t size) { return truncate(path, size); }
int fsync(int fd) {
    char path[PATH_MAX];
    int kind = open_below(fd, path);
    if (!kind) return syscall(SYS_fsync, fd);
    if (strike("fsync", path) < 0) return -1;
    put(NULL, 0, "sync\t%s", path);
    return 0;
}
int fdatasync(int fd) { return fsync(fd); }

int renameat2(int folder, const char *old, int other, const char *new, unsigned flags) {
    char from[PATH_MAX], to[PATH_MAX];
    int is_own = below(folder, old, from) && below(other, new, to);
    if (is_own && strike("rename", to) < 0) return -1;
    int failed = syscall(SYS_renameat2, folder, old, other, new, flags);
    if (!failed && is_own) put(NULL, 0, "rename\t%s\t%s\t%u", from, to, flags);
    return failed;
}
int rename(const char *old, const char *new) { return renameat2(AT_FDCWD, old, AT_FDCWD, new, 0); }
int renameat(int folder, const char *old, int other, const char *new) { return renameat2(folder, old, other, new, 0); }
int unlinkat(int folder, const char *path, int flags) {
    char full[PATH_MAX];
    int is_own = below(folder, path, full);
    const char *what = flags & AT_REMOVEDIR ? "rmdir" : "unlink";
    if (is_own && strike(what, full) < 0) return -1;
    int failed = syscall(SYS_unlinkat, folder, path, flags);
    if (!failed && is_own) put(NULL, 0, "%s\t%s", what, full);
    return failed;
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }
int remove(const char *path) {
    return unlinkat(AT_FDCWD, path, S_ISDIR(mode_of(path)) ? AT_REMOVEDIR : 0);
}
int mkdirat(int folder, const char *path, mode_t mode) {
    char full[PATH_MAX];
    int is_own = below(folder, path, full);
    if (is_own && strike("mkdir", full) < 0) return -1;
    int failed = syscall(SYS_mkdirat, folder, path, mode);
    if (!failed && is_own) put(NULL, 0, "mkdir\t%s", full);
    return failed;
}
int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }
