#!/usr/bin/env bash
# The first hour with a GPU: from one layer's time to the same bytes after a kill, and a table to paste into an issue.
#
#     scripts/first_hour_gpu.sh                   # on the first GPU
#     DEVICE=cpu scripts/first_hour_gpu.sh        # the same steps at small sizes on a machine without one
#     STEPS="layer two" scripts/first_hour_gpu.sh
#
# From a clone with the program and its tests installed (pip install -e '.[test]'). Exits with 1 if any step failed.
# docs/how-to/first-hour.md says what each step shows. Everything below may be set from outside.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}  # this clone, whatever else is installed

DEVICE=${DEVICE:-cuda}
OUT=${OUT:-out/first-hour-$DEVICE}                  # new or empty; each step's log, and the table
PYTHON=${PYTHON:-python}
RECIPE=${RECIPE:-tiny-minimax-m2-fp8-int4}          # small: it is run five times
HELD_OUT=${HELD_OUT:-held-out}                      # the set by which the outputs of CPU and GPU are compared
TESTS=${TESTS:-tests}                               # where tests marked on_device are looked for
if [ "$DEVICE" = cpu ]; then
    LAYER=${LAYER:-"tiny-minimax-m2-fp8-int4 --tokens 256"}
    PROFILED=${PROFILED:-"tiny-minimax-m2-fp8-int4 --tokens 64"}
    FULL=${FULL:-"minimax-m2.1-fp8-int4 --layers 2 --width-divisor 12 --experts 16 --tokens 256 --texts 1"}
else
    LAYER=${LAYER:-"minimax-m2.1-fp8-int4-131k --tokens 131072"}    # recipe and options of benchmarks/layer.py
    PROFILED=${PROFILED:-"minimax-m2.1-fp8-int4-131k --experts 16 --tokens 8192"}
    # Recipe and options of benchmarks/full_size.py; its Hub keeps some 2.1 GB a layer, beside 30 GB.
    FULL=${FULL:-"minimax-m2.1-fp8-int4 --layers ${FULL_LAYERS:-12} --tokens 16384 --texts 16 --window 12GB"}
fi
MEMORY=${MEMORY:-4GiB}                              # for the recipe's runs: all is held, but in one, which gets LESS
FULL_SECONDS=${FULL_SECONDS:-inf}                   # after which the step `full` stops; give it again, and it goes on
FULL_FOLDER=${FULL_FOLDER:-out/full-size-$DEVICE}   # where it goes on; it is removed when the step has passed
LESS=${LESS:-}                                      # the least that a run takes: one unit's sums, no inputs, no states
ALL="machine tests memory cpu layer profile resume two full"
STEPS=${STEPS:-$ALL}

SKIPPED=77     # what a step returns that has nothing to do here; its figure says why
UNFINISHED=75  # what a step returns whose time was over: it goes on when it is done again

quantize() { "$PYTHON" -m quantizers "$@"; }
figure() { printf '%s\n' "$*" >"$FIGURE"; }  # a step's last word, for the table
skip() { figure "$*"; return "$SKIPPED"; }
figures() { "$PYTHON" scripts/first_hour_figures.py "$@" >"$FIGURE"; }

# quantize_into FOLDER [OPTION…]: a run whose gates may fail. Both outputs are then compared; a broken run is no output.
quantize_into() {
    local status=0
    quantize run "$RECIPE" --output "$@" || status=$?
    [ "$status" = 0 ] || [ "$status" = 3 ]
}

# Hashes of all files but those that carry times and memory.
hashes() {
    (cd "$1" && find . -type f ! -name report.json ! -name report.html ! -name README.md -exec sha256sum {} + | sort -k 2)
}

# same_bytes FOLDER FOLDER
same_bytes() {
    hashes "$1" >"$1.sha256" && hashes "$2" >"$2.sha256" || return 1
    if ! diff "$1.sha256" "$2.sha256"; then
        figure "other bytes in $(diff "$1.sha256" "$2.sha256" | grep -c '^>') of $(wc -l <"$1.sha256") files"
        return 1
    fi
    figure "the same bytes in $(wc -l <"$1.sha256") files"
}

# The output that the other steps compare with: made once, whichever step comes first.
whole() { [ -f "$OUT/whole/config.json" ] || quantize_into "$OUT/whole" --device "$DEVICE" --device-memory "$MEMORY"; }

step_machine() {
    quantize --version --json >"$OUT/machine.json" && cat "$OUT/machine.json"
    command -v nvidia-smi >/dev/null && nvidia-smi
    figures machine "$OUT/machine.json" "$DEVICE"
}

step_tests() {
    local status=0
    QUANTIZERS_TEST_DEVICE=$DEVICE "$PYTHON" -m pytest "$TESTS" -m on_device -n 0 | tee "$OUT/pytest.txt" || status=$?
    figure "$(tail -n 1 "$OUT/pytest.txt" | sed 's/^=* *//; s/ *=*$//')"
    return "$status"
}

step_memory() {
    local less=$LESS
    [ -n "$less" ] || less=$("$PYTHON" scripts/first_hour_figures.py least "$RECIPE" "$DEVICE") || return
    whole && quantize_into "$OUT/less" --device "$DEVICE" --device-memory "$less" && same_bytes "$OUT/whole" "$OUT/less"
}

step_cpu() {
    local source
    whole && quantize_into "$OUT/on-cpu" --device cpu || return
    source=$("$PYTHON" scripts/first_hour_figures.py source "$RECIPE") &&
        quantize eval "$source" "$OUT/whole" "$OUT/on-cpu" --data "$HELD_OUT" --device "$DEVICE" --no-picture --json \
            >"$OUT/eval.json" &&
        figures gates "$OUT/whole/report.json" "$OUT/on-cpu/report.json" "$OUT/eval.json"
}

step_layer() {
    local words
    read -ra words <<<"$LAYER"
    "$PYTHON" benchmarks/layer.py "${words[@]}" --device "$DEVICE" --json >"$OUT/layer.json" &&
        figures layer "$OUT/layer.json"
}

step_profile() {
    local words
    read -ra words <<<"$PROFILED"
    words=(benchmarks/layer.py "${words[@]}" --device "$DEVICE" --trace "$OUT/trace.json.gz")
    "$PYTHON" "${words[@]}" | tee "$OUT/profile.txt" || return
    figure "profile.txt, trace.json.gz"
    command -v nsys >/dev/null || return 0
    nsys profile --output "$OUT/nsys" --force-overwrite true "$PYTHON" "${words[@]}" >/dev/null &&
        figure "profile.txt, trace.json.gz, nsys.nsys-rep"
}

step_resume() {
    local entry=$OUT/resumed/.quantize/layers/00000.json
    whole || return
    "$PYTHON" -m quantizers run "$RECIPE" --output "$OUT/resumed" --device "$DEVICE" &
    local run=$!
    while kill -0 "$run" 2>/dev/null && [ ! -f "$entry" ]; do sleep 0.02; done
    kill -KILL "$run" 2>/dev/null
    wait "$run"
    [ ! -f "$OUT/resumed/config.json" ] || { figure "the run ended before it could be killed"; return 1; }
    [ -f "$entry" ] || { figure "the run ended before its first layer was done"; return 1; }
    quantize_into "$OUT/resumed" --device "$DEVICE" && same_bytes "$OUT/whole" "$OUT/resumed"
}

step_two() {
    local found
    found=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')
    [ "$DEVICE" = cpu ] || [ "$found" -ge 2 ] || { skip "one GPU"; return; }
    local status=0
    whole || return
    "$PYTHON" -m torch.distributed.run --nproc-per-node 2 -m quantizers \
        run "$RECIPE" --output "$OUT/two" --device "${DEVICE%%:*}" || status=$?
    [ -f "$OUT/two/config.json" ] || return "$status"  # torchrun ends with 1 where a gate failed, too
    same_bytes "$OUT/whole" "$OUT/two"
}

step_full() {
    local words status=0
    read -ra words <<<"$FULL"
    "$PYTHON" benchmarks/full_size.py "${words[@]}" --device "$DEVICE" --folder "$FULL_FOLDER" \
        --seconds "$FULL_SECONDS" --signals KILL@1 --reference 2 --json >"$OUT/full.json" || status=$?
    [ ! -s "$OUT/full.json" ] || figures full "$OUT/full.json" || [ "$status" != 0 ] || status=1
    [ "$status" != 0 ] || rm -rf "$FULL_FOLDER"
    return "$status"
}

# row STEP: does it, keeps its log, and adds its row to the table.
row() {
    local status=0 result log=$OUT/$1.log started=$SECONDS
    FIGURE=$OUT/$1.figure
    rm -f "$FIGURE"
    printf '== %s\n' "$1"
    "step_$1" >"$log" 2>&1 || status=$?
    case $status in
        0) result=PASS ;;
        "$SKIPPED") result=skipped ;;
        "$UNFINISHED") result=unfinished failed=1 ;;
        *) result=FAIL failed=1 ;;
    esac
    [ -s "$FIGURE" ] || tail -n 1 "$log" | cut -c 1-200 >"$FIGURE"
    printf '| %s | %s | %s | %d s |\n' "$1" "$result" "$(tr '|' '/' <"$FIGURE")" $((SECONDS - started)) |
        tee -a "$OUT/table.md"
}

if [ -e "$OUT/table.md" ]; then
    echo "$OUT: holds an earlier hour; remove it, or give another folder with OUT=" >&2
    exit 2
fi
for step in $STEPS; do
    if ! declare -F "step_$step" >/dev/null; then
        echo "STEPS: $step is no step; the steps are $ALL" >&2
        exit 2
    fi
done
mkdir -p "$OUT" || exit
failed=0
printf '| step | result | figure | took |\n|---|---|---|---|\n' >"$OUT/table.md"
for step in $STEPS; do row "$step"; done
printf '\n%s, to paste into an issue:\n\n' "$OUT/table.md"
cat "$OUT/table.md"
exit "$failed"
