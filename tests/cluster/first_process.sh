# First process of a host: NAME FOLDER KEPT… — its name, its own /root, /tmp and /run, and its sshd. FOLDER is its disk;
# the KEPT folders (project, environment, Python) lie below /root or /tmp and stay visible.
set -e
name=$1 folder=$2
shift 2
hostname "$name"
mount -t proc proc /proc
mount --bind /mnt/etc/hosts /etc/hosts
mount --bind /mnt/etc/ssh_config /etc/ssh/ssh_config
for kept in "$@"; do
    mkdir -p "$folder/kept$kept"
    mount --rbind "$kept" "$folder/kept$kept"
done
for own in root tmp; do
    mkdir -p "$folder/$own"
    chmod 700 "$folder/$own"
    mount --bind "$folder/$own" "/$own"
done
for kept in "$@"; do
    mkdir -p "$kept"
    mount --rbind "$folder/kept$kept" "$kept"
done
mount -t tmpfs tmpfs /run
mkdir -p /run/sshd /run/munge
/usr/sbin/sshd -f /mnt/etc/sshd_config -E "$folder/sshd.log"
[[ ! -f $folder/services.sh ]] || . "$folder/services.sh"
touch /run/ready
while :; do
    sleep 1000 &
    wait $! || true # this shell also collects the processes whose parents have ended
done
