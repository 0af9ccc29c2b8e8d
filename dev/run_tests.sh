#!/usr/bin/env bash
# Runs every test program and script, shows the output of those that fail and closes with "N passed, N failed".
#
#   dev/run_tests.sh [BUILD]...     of these builds (default: build); build/address-undefined and build/thread are those
#                                   with sanitizers: the first with up to two ranks, the second for device and comm
#   dev/run_tests.sh --grid         test_gpt's whole grid of options instead, on 1, 2, 3, 4 and 8 ranks
#   VERBOSE=1                       a line for each, with the seconds it took
#   TIMEOUT=N                       seconds that each may take (default: 300)
set -u
cd "$(dirname "$0")/.." || exit 1

TIMEOUT=${TIMEOUT:-300}

# Threads that wait must not take the cores of those that work: there may be more ranks than cores.
export LC_ALL=C OMP_WAIT_POLICY=passive
unset OMP_NUM_THREADS ${!OPENBLAS_@}
if (($(id -u) == 0)); then export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; fi
# Sandboxes may forbid ranks to copy from each other's memory directly.
export OMPI_MCA_btl_vader_single_copy_mechanism=${OMPI_MCA_btl_vader_single_copy_mechanism:-none}
# What sanitizers report about MPI's own libraries; those keep no frame pointers.
export ASAN_OPTIONS=${ASAN_OPTIONS:-fast_unwind_on_malloc=0}
export LSAN_OPTIONS=${LSAN_OPTIONS:-suppressions=$PWD/dev/lsan.supp:print_suppressions=0}
export TSAN_OPTIONS=${TSAN_OPTIONS:-suppressions=$PWD/dev/tsan.supp}

logs=$(mktemp -d)
log=$logs/output
trap 'rm -rf "$logs"' EXIT
trap 'exit 1' INT TERM
all_passed=0
all_failed=0

# ended NAME CODE PASSED FAILED: takes the counts down. A program that ended badly without naming a failed test, or well
# without naming a passed one, is itself a failed test.
ended() {
    local name=$1 code=$2 passed=$3 failed=$4 how="exit code $2" file
    ((code == 0 || failed > 0)) || failed=1
    ((code != 0 || passed + failed > 0)) || failed=1
    ((code != 124 && code != 137)) || how="not done after $TIMEOUT s"
    ((code != 127)) || how='not there'
    all_passed=$((all_passed + passed))
    all_failed=$((all_failed + failed))
    if ((failed > 0)); then
        echo "--- $name: $passed passed, $failed failed, $how"
        for file in "$logs"/*; do
            [[ $file == "$log" ]] || echo "--- rank ${file##*.}"
            # Of other ranks than 0 the end is enough.
            if [[ $file == "$log" || $file == *.0 ]]; then cat "$file"; else tail -n 20 "$file"; fi
        done
    elif [[ ${VERBOSE:-0} == 1 ]]; then
        printf '%7s s  %4d  %s\n' "$took" "$passed" "$name"
    fi
}

# timed COMMAND...: sets code and took; output to the log.
timed() {
    local begin=$EPOCHREALTIME
    rm -f "$logs"/*
    timeout -k 10 "$TIMEOUT" "$@" >"$log" 2>&1 </dev/null
    code=$?
    took=$(awk "BEGIN { printf \"%.1f\", $EPOCHREALTIME - $begin }")
}

# counts WORD: for each log with a summary of cmocka's, how many tests it says have PASSED or FAILED.
counts() {
    local file
    for file in "$logs"/*; do
        grep -aqE '\[  (PASSED|FAILED)  \] [0-9]+ test' "$file" || continue
        grep -aoE "\[  $1  \] [0-9]+ test" "$file" | awk '{ n += $4 } END { print n + 0 }'
    done
}

# program NAME [RANKS [ARGUMENT]...]: a program of cmocka's; with more than one rank under mpirun, each with a log of its
# own. Passed is what all ranks say has passed, failed what any says has failed.
program() {
    local path=$build/$1 ranks=${2:-1} name="$build/$1" passed failed
    shift $(($# < 2 ? $# : 2))
    name+=${*:+ $*}
    ((ranks == 1)) || name+=", $ranks ranks"
    if [[ ! -x $path ]]; then
        rm -f "$logs"/*
        echo "$path is not there" >"$log"
        ended "$name" 127 0 1
        return
    fi
    if ((ranks == 1)); then timed "$path" "$@"
    else
        timed mpirun --oversubscribe -n "$ranks" sh -c 'log=$1; shift; exec "$0" "$@" >"$log.$OMPI_COMM_WORLD_RANK" 2>&1' \
            "$path" "$log" "$@"
    fi
    passed=$(counts PASSED | sort -n | head -n 1)
    failed=$(counts FAILED | sort -n | tail -n 1)
    ended "$name" "$code" "${passed:-0}" "${failed:-0}"
}

# ends CODE WORDS COMMAND...: whether two ranks end with CODE after saying WORDS once or, where each may, oftener.
ends() {
    local expected=$1 words=$2
    shift 2
    timed mpirun -n 2 "$@"
    if ((code == expected)) && grep -aqF "$words" "$log"; then ended "$*" 0 1 0; else ended "$*" "$code" 0 1; fi
}

# script PATH: its last line is "N passed, N failed". TRAIN is the program it tests: the normal build's lies where its
# users look for it, the others' in their own folder.
script() {
    local passed=0 failed=0 train=./train_gpt
    [[ $build == build ]] || train=$build/train_gpt
    timed env TRAIN="$train" "$1"
    read -r passed failed < <(sed -nE '$s/^([0-9]+) passed, ([0-9]+) failed$/\1 \2/p' "$log")
    ended "$1 of $build" "$code" "${passed:-0}" "${failed:-0}"
}

# compiles NAME COMMAND...: whether a compiler, where it is there, takes a source without a word.
compiles() {
    local name=$1
    shift
    command -v "$1" >/dev/null || return 0
    timed "$@"
    if ((code == 0)) && [[ ! -s $log ]]; then ended "$name" 0 1 0; else ended "$name" "$code" 0 1; fi
}

# The other compilers: clang for all sources, nvcc for the trainer, which must stay valid CUDA C++.
other_compilers() {
    compiles 'clang: all sources' clang -fsyntax-only -std=gnu11 -fopenmp -Wall -Wextra -Werror -Wno-unused-function \
        $(mpicc --showme:compile) -D_GNU_SOURCE -I. -Ifsdp -Idev fsdp/*.c data/*.c dev/test_*.c dev/ops_reference.c dev/count_allocations.c test_gpt.c -x c train_gpt.cu
    compiles 'nvcc: train_gpt.cu' nvcc -x cu -std=c++17 -Werror all-warnings -I. -Ifsdp -c train_gpt.cu -o /dev/null
}

# suite BUILD: all that there is to test of a build.
suite() {
    local build=$1 singles='test_ops test_loader test_safetensors test_data test_device test_order' several='test_comm test_fsdp test_gpt'
    local counts='1 2 3 4 8' name ranks
    case $build in
    build) ;;
    */thread*) singles=test_device several=test_comm counts='1 2 4' ;;
    *) counts='1 2' ;;
    esac
    for name in $singles; do program "$name"; done
    for name in $several; do
        for ranks in $counts; do program "$name" "$ranks"; done
    done
    [[ $build != build ]] || ends 1 'gather of h.7 has not ended' $build/test_comm --timeout
    [[ $build != build ]] || ends 2 'there is no configuration' $build/test_comm --fault
    [[ $build == */thread* ]] || script dev/test_cli.sh
}

if [[ ${1:-} == --grid ]]; then
    build=build TIMEOUT=3000
    for ranks in 1 2 3 4 8; do program test_gpt "$ranks" --grid; done
else
    (($# > 0)) || set -- build
    for build in "$@"; do suite "$build"; done
    other_compilers
fi

echo "$all_passed passed, $all_failed failed"
((all_failed == 0))
