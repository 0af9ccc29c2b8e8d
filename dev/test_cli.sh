#!/usr/bin/env bash
# Black-box tests of train_gpt: what it refuses and how it says so, what it writes, and that it ends.
#
#   dev/test_cli.sh              tests ./train_gpt
#   TRAIN=PATH dev/test_cli.sh   tests another build, with the data tools in data/ beside it
#
# Prints what fails and closes with "N passed, N failed".
set -u

root=$(cd "$(dirname "$0")/.." && pwd)
TRAIN=$(realpath "${TRAIN:-$root/train_gpt}")
tools=$(dirname "$TRAIN")/data
work=$(mktemp -d)
pids=()
passed=0
failed=0

clean() {
    ((${#pids[@]} == 0)) || kill -KILL "${pids[@]}" 2>/dev/null
    rm -rf "$work"
}
trap clean EXIT
trap 'exit 1' INT TERM

export LC_ALL=C OMP_WAIT_POLICY=passive
unset OMP_NUM_THREADS ${!OPENBLAS_@}
# Ranks that end by themselves need not be given time to.
export OMPI_MCA_odls_base_sigkill_timeout=0
if (($(id -u) == 0)); then export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; fi

if [[ ! -x $TRAIN || ! -x $tools/stories || ! -x $tools/tokenize ]]; then
    echo "FAILED: $TRAIN and the tools in $tools are not all there"
    echo "0 passed, 1 failed"
    exit 1
fi
cd "$work" || exit 1

# ----------------------------------------------------------------------------------------------------------------------
# how it is tested

# verdict NAME WHY: passed if WHY is empty; otherwise shows what the program last said.
verdict() {
    if [[ -z $2 ]]; then
        passed=$((passed + 1))
        return
    fi
    failed=$((failed + 1))
    echo "FAILED: $1: $2"
    tail -n 12 out err 2>/dev/null | sed 's/^/    | /'
}

# check NAME COMMAND...: passed if the command succeeds.
check() {
    local name=$1
    shift
    if "$@"; then verdict "$name" ''; else verdict "$name" "not so: $*"; fi
}

# What Open MPI sets up for ranks there are none of takes it longer than most of these tests.
alone=(env OMPI_MCA_ess_singleton_isolated=1 OMPI_MCA_pml=ob1 OMPI_MCA_btl=self)

# run RANKS ARGUMENT...: the program's output goes to the files out and err, its exit code into code.
run() {
    local ranks=$1
    shift
    if ((ranks == 1)); then timeout -k 5 60 "${alone[@]}" "$TRAIN" "$@" >out 2>err </dev/null
    else timeout -k 5 60 mpirun --oversubscribe -n "$ranks" "$TRAIN" "$@" >out 2>err </dev/null
    fi
    code=$?
}

# refused CODE RANKS WORDS ARGUMENT...: for each number in RANKS the program must end with CODE and say one line that
# holds each of WORDS, separated by ";". MPI's own lines do not count.
refused() {
    local expected=$1 ranks=$2 words=$3 n word why
    shift 3
    for n in $ranks; do
        run "$n" "$@"
        why=
        ((code == expected)) || why+="exit code $code, expected $expected; "
        grep -a '^train_gpt' err >said
        (($(wc -l <said) == 1)) || why+="$(wc -l <said) lines of ours, expected 1; "
        while IFS= read -r word; do
            grep -aqF -e "$word" said || why+="does not say '$word'; "
        done < <(tr ';' '\n' <<<"$words")
        verdict "$n ranks, $*" "$why"
    done
}

# done_well RANKS ARGUMENT...: exit code 0 and not a word on stderr.
done_well() {
    local ranks=$1 why=
    shift
    run "$ranks" "$@"
    ((code == 0)) || why+="exit code $code, expected 0; "
    ! grep -aq '^train_gpt' err || why+="complains; "
    verdict "$ranks ranks, $*" "$why"
}

# little-endian int32s
int32() {
    local value
    for value; do
        printf '%b' "$(printf '\\x%02x\\x%02x\\x%02x\\x%02x' $((value & 255)) $((value >> 8 & 255)) \
            $((value >> 16 & 255)) $((value >> 24 & 255)))"
    done
}

# header MAGIC VERSION COUNT
header() {
    int32 "$@"
    head -c 1012 /dev/zero
}

# What a run computed, without what a clock measured.
computed() { grep -a -v '"event":"config"' "$1" | sed -E 's/"(ms|tokens_per_s|mfu)":[^,}]*,//g; s/,"exposed_ms":.*/}/'; }

same_log() { diff <(computed "$1") <(computed "$2") >/dev/null; }

value() { grep -a "\"event\":\"$2\"" "$1" | tail -n 1 | sed -nE "s/.*\"$3\":([^,}]*).*/\1/p"; } # FILE EVENT FIELD

# every line of the file is JSON, numbers finite
json_lines() {
    if command -v python3 >/dev/null; then
        python3 -c 'import json, sys
for line in open(sys.argv[1], encoding="utf-8"): assert isinstance(json.loads(line, parse_constant=lambda x: 1 / 0), dict)' "$1"
    else ! grep -avqE '^\{"[^{}]*\}$' "$1"
    fi
}

# the file is one JSON value
json_whole() {
    if command -v python3 >/dev/null; then python3 -c 'import json, sys; json.load(open(sys.argv[1]))' "$1"
    else [[ $(head -c 1 "$1")$(tail -c 2 "$1") == '{}' ]]
    fi
}

# ----------------------------------------------------------------------------------------------------------------------
# data

"$tools/stories" --bytes 60k | "$tools/tokenize" --output good --documents '\n\n' --val-fraction 0.1 >out 2>err
check 'data for the tests' test -s good_train_000000.bin -a -s good_val_000000.bin -a -s good.json
good=(-i 'good_train_*.bin' -t 64 -b 2 -e 3x2x48 --threads 1) # 53k tokens of 257
shard=(-t 64 -b 2 -x 2 -e 2x2x32 --threads 1)

tail -c +1025 good_train_000000.bin | head -c 4000 >tokens # 2000 of them
(header 20240520 1 200; printf '\120\303%.0s' {1..200}) >words.bin # token 50000, as GPT-2's may be
(header 20240520 1 2000; head -c 3990 tokens) >short.bin
(header 20240520 1 2000; cat tokens; printf x) >long.bin
(header 20240521 1 2000; cat tokens) >magic.bin
(header 20240520 3 2000; cat tokens) >version.bin
(header 20240520 1 -5; cat tokens) >negative.bin
(header 20240520 1 1; head -c 2 tokens) >one.bin
(header 20240520 1 64; head -c 128 tokens) >few.bin
(header 20240520 1 2000; cat tokens) >plain.bin
: >empty.bin
head -c 100 good_train_000000.bin >stub.bin
mkdir folder.bin

# ----------------------------------------------------------------------------------------------------------------------
# shards that cannot be used: the file, what is expected and what was found

refused 2 '1 2' 'words.bin;50000;257;HINT' -i words.bin --vocab-size 257 "${shard[@]}"
refused 2 '1 2' 'short.bin;5014 bytes;expected 5024;HINT' -i short.bin "${shard[@]}"
refused 2 1 'long.bin;5025 bytes;expected 5024;HINT' -i long.bin "${shard[@]}"
refused 2 '1 2' 'magic.bin;20240521;expected 20240520;HINT' -i magic.bin "${shard[@]}"
refused 2 1 'version.bin;version 3;expected 1;HINT' -i version.bin "${shard[@]}"
refused 2 1 'negative.bin;-5' -i negative.bin "${shard[@]}"
refused 2 '1 2' 'empty.bin;0 bytes;1024' -i empty.bin "${shard[@]}"
refused 2 1 'stub.bin;100 bytes;1024' -i stub.bin "${shard[@]}"
refused 2 1 'folder.bin;regular file' -i folder.bin "${shard[@]}"
refused 2 '1 2' '--train-data;absent*.bin;HINT' -i 'absent*.bin' "${shard[@]}"
refused 2 1 '--val-data;absent*.bin' -i plain.bin -j 'absent*.bin' "${shard[@]}"
refused 2 '1 2' '--val-data;one.bin;1 tokens;at least 2' -i plain.bin -j one.bin "${shard[@]}"
refused 2 1 '--train-data;few.bin;64 tokens;at least 65;--seq-len' -i few.bin "${shard[@]}"
printf '{"vocab_size": 257' >broken.json
cp plain.bin broken_train_000000.bin
refused 2 1 'broken.json' -i 'broken_train_*.bin' "${shard[@]}"

# ----------------------------------------------------------------------------------------------------------------------
# options

refused 2 '1 2' '--stpes;--steps' "${good[@]}" --stpes 3
refused 2 1 '--wibble-wobble;--help' "${good[@]}" --wibble-wobble
refused 2 1 '-Q;--help' "${good[@]}" -Q 3
refused 2 1 'stray' "${good[@]}" stray
refused 2 '1 2' '--steps;twice' "${good[@]}" -x 3 --steps=3
refused 2 1 '--steps;needs a value' "${good[@]}" --steps
refused 2 1 '--plan;yes' "${good[@]}" --plan=yes
refused 2 '1 2' '--micro-batch;two;expected' --micro-batch two
refused 2 1 '--micro-batch;1.5;expected' -b 1.5
refused 2 1 '--micro-batch;0;expected 1 to' -b 0
refused 2 1 '--lr;much;expected' -l much
refused 2 1 '--final-lr;1.5;expected 0 to 1' -q 1.5
refused 2 1 '--seed;9e99;expected' --seed 9e99
refused 2 '1 2' '--precision;fp8;auto,fp32,bf16' --precision fp8
refused 2 1 '--model;nonsense;HINT' -e nonsense
refused 2 1 '--model;4x4x250;HINT' -e 4x4x250
refused 2 '1 2' '--seq-len 2048;1024;HINT' -i plain.bin -e d6 -t 2048
refused 2 '1 2' '--total-batch 1000;--micro-batch;HINT' "${good[@]}" -d 1000
refused 2 1 '--total-batch;expected' "${good[@]}" -d 9000000000M
refused 2 1 '--micro-batch;--seq-len;expected' --plan -e 1x1x64 -b 50k -t 50k
refused 2 '1 2' '--warmup 5;--steps 5;HINT' "${good[@]}" -x 5 -u 5
refused 2 '1 2' '--ranks;--plan;mpirun' "${good[@]}" --ranks 8
refused 2 '1 2' '--shard;half;full,grad,optimizer,none' "${good[@]}" --shard half
refused 2 '2' '--shard-ranks 3;2 ranks;HINT' "${good[@]}" --shard-ranks 3
refused 2 '2' '--shard none;--shard-ranks 2;HINT' "${good[@]}" -z 0 --shard-ranks 2
refused 2 1 '--shard-ranks 3;8 ranks' --plan --ranks 8 --shard-ranks 3
refused 2 1 '--unit-blocks;0;expected' "${good[@]}" --unit-blocks 0
refused 2 1 '--unit-blocks;some;auto' "${good[@]}" --unit-blocks some
refused 2 1 '--prefetch;17;1 to 16' "${good[@]}" --prefetch 17
refused 2 1 '--reduce-dtype;fp16;fp32,bf16' "${good[@]}" --reduce-dtype fp16
refused 1 '1 2' 'nowhere/trace.json;--trace' "${good[@]}" -x 1 --trace nowhere/trace.json
refused 2 '1 2' 'klingon;bytes' "${good[@]}" -x 1 -s 1 --tokenizer klingon
refused 2 1 '--sample-every;--tokenizer' -i plain.bin "${shard[@]}" -s 1

run 1 --help
why=
((code == 0)) || why+="exit code $code; "
listed=0
while read -r letter name; do
    listed=$((listed + 1))
    grep -qE -- "(^| )--$name( |$)" out || why+="--$name is not there; "
    [[ $letter == 0 ]] || grep -q -- "-$letter, --$name" out || why+="-$letter is not there; "
done < <(sed -nE "s/^ *option_[a-z]+\(s, '?([^',]+)'?, \"([a-z0-9-]+)\".*/\1 \2/p" "$root/train_gpt.cu")
((listed >= 40)) || why+="only $listed options found in the source"
verdict '--help lists every option' "$why"

done_well 1 --version
check '--version' grep -qE '^fsdp\.c [0-9]+\.[0-9]+' out

mkdir nowhere && cd nowhere || exit 1 # no data here
done_well 1 --plan --ranks 8
check '--plan for 8 ranks' grep -q 'memory per rank, of 8' out
done_well 2 --plan -e 4x4x64 -t 128
check '--plan of 2 ranks' grep -q 'memory per rank, of 2' out
bf16=$(sed -n 's/^fsdp.c.*, \(bf16\)$/\1/p' out) # what --precision auto is here
cd .. || exit 1

# ----------------------------------------------------------------------------------------------------------------------
# a run: the log, and numbers that do not move

# 5 steps of 256 tokens; with one rank in two micro-steps.
five=("${good[@]:0:8}" -j 'good_val_*.bin' -x 5 -d 256 -l 1e-3 -u 2 -q 0.1)
for precision in fp32 $bf16; do
    done_well 1 "${five[@]}" --precision $precision --threads 1 -o $precision-1 --export $precision-1-model
    for other in '1 3' '2 1' '2 3'; do
        read -r ranks threads <<<"$other"
        name=$precision-$ranks-$threads
        done_well "$ranks" "${five[@]}" --precision $precision --threads "$threads" -o "$name" --export "$name-model"
        # Beside the ledger and file maps: program, libraries, MPI. Sanitizers take more.
        [[ $TRAIN != "$root/train_gpt" ]] || check "$name: memory beyond the ledger" \
            awk -F'other ' '/^peak memory/ { found = $2 + 0 > 0 && $2 + 0 < 96 } END { exit !found }' out
        check "$name: losses and norms to the last digit" same_log $precision-1/log.jsonl "$name/log.jsonl"
        check "$name: parameters to the last bit" cmp -s $precision-1-model/model.safetensors "$name-model/model.safetensors"
    done
done

# 3 steps of 8 micro-batches, on up to 8 ranks and 16 threads; with sanitizers, which are slow, on some of these.
grid='2 16;4 2;8 1'
[[ $TRAIN != "$root/train_gpt" ]] || grid=$(for ranks in 1 2 4 8; do for threads in 1 2 3 16; do printf '%s;' "$ranks $threads"; done; done)
IFS=';' read -ra grid <<<"$grid"
eight=("${good[@]:0:8}" -x 3 -d 1024 -l 1e-3)
for precision in fp32 $bf16; do
    done_well 1 "${eight[@]}" --precision $precision --threads 1 -o eight-$precision
    for other in "${grid[@]}"; do
        read -r ranks threads <<<"$other"
        name=eight-$precision-$ranks-$threads
        done_well "$ranks" "${eight[@]}" --precision $precision --threads "$threads" -o "$name"
        check "$name: losses and norms to the last digit" same_log eight-$precision/log.jsonl "$name/log.jsonl"
    done
done

# Every strategy on four ranks, as two and two as well, and whatever else moves no number; the last two by leaves in bf16.
done_well 1 "${eight[@]}" --precision fp32 --reduce-dtype bf16 -o eight-low
for strategy in '-z grad' '-z 1 --accumulate unsharded' '-z none' '--shard-ranks 2 --recompute attention' \
    '-z 2 --shard-ranks 2 --accumulate unsharded --prefetch 2' '--unit-blocks 2 --recompute block' \
    '--reduce-dtype bf16' '-z optimizer --shard-ranks 2 --reduce-dtype bf16'; do
    read -ra options <<<"$strategy"
    name=eight${strategy// /}
    expected=eight-fp32
    [[ $strategy != *reduce* ]] || expected=eight-low
    done_well 4 "${eight[@]}" --precision fp32 "${options[@]}" -o "$name"
    check "$strategy: losses and norms to the last digit" same_log $expected/log.jsonl "$name/log.jsonl"
done
check 'leaves in bf16 are other numbers' test "$(value eight-low/log.jsonl train loss)" != "$(value eight-fp32/log.jsonl train loss)"

x='-?[0-9.]+(e[-+][0-9]+)?' # a number
# The timeline: every stream of every rank, units and phases by name.
done_well 2 "${five[@]}" --precision fp32 --trace trace.json
check 'the trace is JSON' json_whole trace.json
for words in 'rank 0 on' 'rank 1 on' '"compute"' '"comm"' 'gather of h.0' 'reduction of h.1' 'forward h.1' 'backward h.0' head norm update; do
    check "the trace has $words" grep -q -- "$words" trace.json
done
check 'what a rank waited is in the log' grep -qE '"exposed_ms":'$x',"rank_ms":\['$x,$x,$x'\],"gather_wait_ms":\['$x,$x,$x'\],"slowest_rank":[01],"slowest_host":"[^"]+"\}$' fp32-2-1/log.jsonl

done_well 1 "${five[@]}" --precision fp32 -o traced --trace traced/trace.json
check 'a trace in the output folder' json_whole traced/trace.json
refused 2 1 '-o;traced;already' "${five[@]}" --output traced --trace traced/trace.json
check 'a refused run leaves the trace as it was' test -s traced/trace.json

# A larger one takes no more beside the ledger.
if [[ $TRAIN == "$root/train_gpt" ]]; then
    done_well 2 "${good[@]:0:2}" -e d6 -t 256 -b 1 -x 1
    check 'memory beyond the ledger of d6' awk -F'other ' '/^peak memory/ { found = $2 + 0 > 0 && $2 + 0 < 96 } END { exit !found }' out
fi

log=fp32-1/log.jsonl
check 'the log is lines of JSON' json_lines $log
check 'the log begins with the configuration' grep -q '^{"event":"config",' <(head -n 1 $log)
check 'the configuration is in the log' grep -q '"total-batch":256,.*"precision":"fp32"' $log
check 'a line per step' test "$(grep -cE '^\{"event":"train","step":[1-5],"loss":'$x',"grad_norm":'$x',"lr":'$x',"tokens":[0-9]+,"ms":'$x',"tokens_per_s":'$x',"mfu":'$x',"skipped":false[,}]' $log)" = 5
check 'steps in order, tokens counted' test "$(sed -nE 's/.*"step":([0-9]),.*"tokens":([0-9]+),"ms".*/\1:\2/p' $log | tr '\n' ' ')" = '1:256 2:512 3:768 4:1024 5:1280 '
check 'the learning rate' test "$(sed -nE 's/.*"lr":([^,]*),.*/\1/p' $log | grep -v config | tail -n 5 | tr '\n' ' ')" = '0.0005 0.001 0.001 0.000775 0.000325 '
check 'validation after the last step' test "$(grep -cE '^\{"event":"val","step":5,"loss":'$x',"tokens":'$(($(wc -c <good_val_000000.bin) / 2 - 513))'[,}]' $log)" = 1
check 'the end' test "$(tail -n 1 $log)" = '{"event":"end","step":5,"reason":"done"}'

cp $log kept
refused 2 '1 2' '-o;fp32-1;already;--resume' "${five[@]}" --output fp32-1
check 'a refused --output is left as it was' cmp -s $log kept

# A learning rate that no model survives: all ranks stop before the same update.
lost=("${good[@]:0:8}" -x 20 -d 256 -l 1e6 --eps 0 --grad-clip 0)
refused 3 '1 2' 'stopped before its update;gradient norm;unit' "${lost[@]}"
rm -rf lost && run 2 "${lost[@]}" -o lost
check 'the log says why the run ended' grep -qE '^\{"event":"end","step":[0-9]+,"reason":"nonfinite"\}$' <(tail -n 1 lost/log.jsonl)

# 16 and 32 bits
(header 20240801 7 2000; od -An -v -tx1 -w2 tokens | sed 's/ \(..\) \(..\)/\\x\1\\x\2\\x00\\x00/' | tr -d '\n' | while read -r -d '' text || [[ -n $text ]]; do printf '%b' "$text"; done) >wide.bin
done_well 1 -i plain.bin "${shard[@]}" --vocab-size 257 -o bits16
done_well 1 -i wide.bin "${shard[@]}" --vocab-size 257 -o bits32
check '32-bit shards are the same data' same_log bits16/log.jsonl bits32/log.jsonl

# samples: the likeliest text is the same for all
for n in 1 2; do
    done_well $n "${good[@]}" -x 2 -d 256 -s 2 -g 8 --prompt 'Once upon' --temperature 0 --precision fp32
    sed 's/.*\x1b\[K//' out | grep -A 2 -- '--- sample at step 2' >sample$n
    check "$n ranks: no progress bar where there is no terminal" test -z "$(tr -dc '\033\r' <out)"
done
check 'a sample' grep -q 'Once upon' sample1
check 'the same sample from 2 ranks' cmp -s sample1 sample2

# a loss that explodes
for n in 1 2; do
    refused 3 $n 'step;stopped;HINT' "${good[@]}" -d 256 -x 20 -l 1e6 -c 1000 --grad-clip 0 -o explodes$n
    check 'the log says so' grep -q '"event":"end","step":[0-9]*,"reason":"nonfinite"' explodes$n/log.jsonl
    check 'and is JSON' json_lines explodes$n/log.jsonl
done

# ----------------------------------------------------------------------------------------------------------------------
# model folders

trained=fp32-1-model
done_well 1 "${good[@]:0:6}" -e $trained --threads 1 --precision fp32 -x 1 -l 0 -j 'good_val_*.bin' -o back
check 'a model read back has the loss it had' test "$(value back/log.jsonl val loss)" = "$(value $log val loss)"
cd nowhere || exit 1
for n in 1 2; do
    done_well $n -e ../$trained -t 64 --steps 0 --export again$n
    check 'exported, read, exported: the same weights' cmp -s ../$trained/model.safetensors again$n/model.safetensors
    check 'exported, read, exported: the same config' cmp -s ../$trained/config.json again$n/config.json
done
done_well 1 -e ../$trained -t 64 --steps 0 --export half --export-dtype bf16
done_well 1 -e half -t 64 --steps 0 --export half2 --export-dtype bf16
check 'the same in bf16' cmp -s half/model.safetensors half2/model.safetensors
check 'half the size' test $(($(wc -c <half/model.safetensors) * 10)) -lt $(($(wc -c <../$trained/model.safetensors) * 6))
done_well 1 -e 1x2x16 -t 8 --vocab-size 257 --steps 0 -o new/run --export new/run/model
cd .. || exit 1

mkdir bare nojson nolayers huge relu noweights cut other
printf '{"model_type": "gpt2", "n_layer": 3,' >nojson/config.json
grep -v n_layer $trained/config.json >nolayers/config.json
sed -E 's/("n_embd": *)[0-9]+/\11000000000/' $trained/config.json >huge/config.json
sed 's/gelu_new/relu/' $trained/config.json >relu/config.json
cp $trained/config.json noweights
cp $trained/config.json cut && head -c 100000 $trained/model.safetensors >cut/model.safetensors
sed -E 's/("n_positions": *)64/\132/' $trained/config.json >other/config.json && cp $trained/model.safetensors other
refused 2 '1 2' 'bare/config.json' "${good[@]:0:6}" -e bare
refused 2 1 'nojson/config.json;line' "${good[@]:0:6}" -e nojson
refused 2 '1 2' 'nolayers/config.json;n_layer;HINT' "${good[@]:0:6}" -e nolayers
refused 2 1 'huge/config.json;n_embd' "${good[@]:0:6}" -e huge
refused 2 1 'relu/config.json;activation_function;gelu_new' "${good[@]:0:6}" -e relu
refused 2 '1 2' 'noweights/model.safetensors' "${good[@]:0:6}" -e noweights
refused 2 1 'cut/model.safetensors' "${good[@]:0:6}" -e cut
refused 2 1 'other/model.safetensors;wpe.weight;64;32;HINT' "${good[@]:0:2}" -t 32 -e other
refused 2 1 "--vocab-size 300;$trained;257" "${good[@]:0:6}" -e $trained --vocab-size 300

sed '2i"scale_attn_by_inverse_layer_idx": true,' $trained/config.json >relu/config.json
refused 2 1 'relu/config.json;scale_attn_by_inverse_layer_idx' "${good[@]:0:6}" -e relu
refused 2 1 '--seq-len 65;64' "${good[@]:0:2}" -t 65 -e $trained

# What a model says, without training or data; its context is the model's.
done_well 1 -e $trained --steps 0 --prompt 'Once ' -g 20
check 'a sample without training begins with the prompt' grep -q '^Once ' out
done_well 2 -e $trained --steps 0 -j 'good_val_*.bin'
check 'a validation without training' grep -q '^validation at step 0: loss' out
# A head wider than the kernels' buffers, in a path that holds the mark of shards twice.
mkdir my_training && cp good_train_000000.bin my_training/ && cp good.json my_training/
done_well 1 -i 'my_training/good_train_*.bin' -e 1x1x1040 -t 8 -b 1 -x 1 --precision fp32
check "the card of data in a folder named like shards" grep -q 'vocabulary 257' out

# ----------------------------------------------------------------------------------------------------------------------
# what cannot be written

refused 1 '1 2' 'cannot make folder good.json;--output' "${five[@]}" -o good.json/run
refused 1 '1 2' 'cannot make folder good.json/model;--export' "${five[@]}" --export good.json/model
refused 1 1 '/proc/run;--output' "${five[@]}" -o /proc/run

refused 2 1 '--export;fp32-1-model;already' "${five[@]}" --export $trained
(flock 9; refused 1 1 '--output busy;another run' "${five[@]}" -o busy; echo $passed $failed >counted) 9>>"$(mkdir -p busy && echo busy/log.jsonl)"
read -r passed failed <counted
run 1 --help && timeout 20 "${alone[@]}" "$TRAIN" --help >/dev/full 2>err
check 'a full standard output' test $? = 1

# A disk with 4 KiB left, mounted for these commands alone; where the system does not let us, untested.
mkdir disk
namespace=(unshare --mount)
(($(id -u) == 0)) || namespace=(unshare --mount --map-root-user)
full='mount -t tmpfs -o size=16k none disk && head -c 12k /dev/zero >disk/ballast && exec "$@"'
if "${namespace[@]}" sh -c "$full" sh true 2>/dev/null; then
    kept=$TRAIN
    printf '#!/bin/sh\nset -- "%s" "$@"\n%s\n' "$kept" "$full" >on_full_disk && chmod +x on_full_disk
    printf '#!/bin/sh\nexec %s ./on_full_disk "$@"\n' "${namespace[*]}" >full_disk && chmod +x full_disk
    TRAIN=./full_disk
    refused 1 '1 2' 'disk/run/log.jsonl;full' "${good[@]}" -d 256 -x 100 -o disk/run
    refused 1 1 'disk/model/model.safetensors' "${good[@]}" -d 256 -x 1 --export disk/model
    TRAIN=$kept
fi

# ----------------------------------------------------------------------------------------------------------------------
# it ends when it is told to, and when a rank is gone

# until SECONDS COMMAND...: waits for the command to succeed.
until_so() {
    local left=$(($1 * 20))
    shift
    until "$@"; do
        ((left-- > 0)) || return 1
        sleep 0.05
    done
}
gone() { ! kill -0 "$1" 2>/dev/null; }

# stopped NAME RANKS WHOM: starts a long run, sends SIGTERM to the command (WHOM = job) or SIGKILL to a rank.
stopped() {
    local name=$1 ranks=$2 whom=$3 why='' job code rank launcher=("${alone[@]}")
    ((ranks == 1)) || launcher=(mpirun --oversubscribe -n "$ranks")
    rm -f pid.*
    "${launcher[@]}" sh -c 'echo $$ >pid.${OMPI_COMM_WORLD_RANK:-0}; exec "$0" "$@"' \
        "$TRAIN" "${good[@]}" -x 1M -o "$name" >out 2>err </dev/null &
    job=$!
    pids+=("$job")
    until_so 20 grep -qs '"step":3,' "$name/log.jsonl" || why+="did not begin; "
    if [[ $whom == job ]]; then kill -TERM $job; else kill -KILL "$(cat "pid.$whom")"; fi
    until_so 20 gone $job || why+="still runs 20 s later; "
    for ((rank = 0; rank < ranks; rank++)); do
        until_so 5 gone "$(cat pid.$rank)" || why+="rank $rank still runs; "
        pids+=("$(cat pid.$rank)")
    done
    kill -KILL "${pids[@]}" 2>/dev/null
    pids=()
    wait $job 2>/dev/null
    code=$?
    ((code != 0)) || why+="exit code 0; "
    # 75 once it saved its state, 143 where there is none to save
    [[ $ranks != 1 || $code == 75 || $code == 143 ]] || why+="exit code $code, expected 75 or 143; "
    verdict "$name" "$why"
}

stopped 'SIGTERM, 1 rank' 1 job
stopped 'SIGTERM, 2 ranks' 2 job
stopped 'rank 1 killed' 2 1

echo "$passed passed, $failed failed"
((failed == 0))
