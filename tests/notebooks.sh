#!/usr/bin/env bash
# Run every notebook's tests, each notebook in a process of its own, and say how each went.
#   tests/notebooks.sh                       all of nbs/*.ipynb
#   tests/notebooks.sh nbs/04_model.ipynb    one of them
# On a CPU two run at a time. With a GPU they run one at a time, since they time things and fill its memory, and
# the cells marked `#| cuda` run as well.
set -u
cd "$(dirname "$0")/.." || exit 1
bin=.venv/bin

# One notebook. nbdev_test exits 0 when it finds nothing to test, so we ask for its "Success." too.
if [ $# -eq 1 ]; then
    start=$SECONDS
    log=$("$bin/nbdev_test" --path "$1" --flags "${NB_FLAGS:-}" 2>&1); status=$?
    took=$((SECONDS - start))
    if [ $status -eq 0 ] && grep -q '^Success\.' <<<"$log"; then printf 'ok      %4d s  %s\n' $took "$1"
    else printf 'FAILED  %4d s  %s\n%s\n' $took "$1" "$log"; exit 1; fi
    exit 0
fi

notebooks=(nbs/*.ipynb)
[ -e "${notebooks[0]}" ] || { echo "There are no notebooks in nbs/."; exit 1; }
jobs=2
if "$bin/python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    jobs=1; export NB_FLAGS=cuda
fi
cores=$(getconf _NPROCESSORS_ONLN)
[ $jobs -eq 1 ] || export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > jobs ? cores / jobs : 1))}

results=$(mktemp)
trap 'rm -f "$results"' EXIT
printf '%s\n' "${notebooks[@]}" | xargs -P $jobs -n 1 bash tests/notebooks.sh | tee "$results"
passed=$(grep -cE '^ok +[0-9]+ s  nbs/' "$results")
echo "$passed of ${#notebooks[@]} notebooks passed"
if [ "$passed" -ne ${#notebooks[@]} ]; then
    echo "These did not:"
    printf '  %s\n' "${notebooks[@]}" | grep -vxF "$(sed -n 's/^ok .* s  /  /p' "$results")"
    exit 1
fi
