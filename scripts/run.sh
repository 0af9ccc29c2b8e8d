#!/usr/bin/env bash
# From nothing to a trained model: scripts/run.sh [stories | kjv | TEXTFILE] [RANKS]
#
#   stories   32 MB of stories whose entropy is known exactly; no network needed      some 3 minutes on two cores
#   kjv       the King James Bible from the distribution's packages, 4.1 MB           some 6 minutes on two cores
#   TEXTFILE  any text, its last tenth for validation; trained like kjv
#
# Bytes are the tokens. Everything lands in data/corpus/ and runs/NAME-TIME/. `make run` calls this.
set -euo pipefail
cd "$(dirname "$0")/.."
data=${1:-stories} ranks=${2:-2}

if [ "$(id -u)" = 0 ]; then export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; fi
case $data in
stories | kjv) name=$data ;;
*)
    name=$(basename "${data%.*}" | tr -c 'A-Za-z0-9._\n-' _)
    [ -r "$data" ] || { echo "run: no text file '$data'. HINT: DATA is stories, kjv or a readable file" >&2 && exit 2; }
    ;;
esac
corpus=data/corpus/$name output=runs/$name-$(date +%Y%m%d-%H%M%S)
mkdir -p data/corpus runs

# ---- text -> token shards
case $data in
stories)
    [ -e $corpus.txt ] || { data/stories --seed 1 --bytes 32M >$corpus.tmp && mv $corpus.tmp $corpus.txt; }
    split=(--documents '\n\n' --val-fraction 0.02)
    ;;
kjv)
    command -v bible >/dev/null || scripts/deps.sh kjv
    [ -e $corpus.txt ] || { bible -f 'Gen1:1-Rev22:21' | cut -d' ' -f2- >$corpus.tmp && mv $corpus.tmp $corpus.txt; }
    split=(--val-fraction 0.1)
    ;;
*)
    cp "$data" "$corpus.txt"
    split=(--val-fraction 0.1)
    ;;
esac
[ "$corpus.json" -nt "$corpus.txt" ] || data/tokenize --output "$corpus" "${split[@]}" "$corpus.txt"

# ---- token shards -> model. Small, because what counts is what minutes on two cores can teach it: on the same minutes
# models of 192 and 256 channels end worse. A step is `sequences` of 256 tokens, or the nearest the ranks can share.
if [ "$data" = stories ]; then
    sequences=32 training=(--steps 1200 --lr 3e-3 --warmup 100 --final-lr 0.1 --sample-every 400 --val-every 400)
else
    sequences=16 training=(--steps 4500 --lr 5e-3 --warmup 100 --final-lr 0.02 --beta2 0.98 --sample-every 1500 --val-every 1500)
fi
each=$((sequences / ranks > 0 ? sequences / ranks : 1))
over=$([ "$ranks" -gt "$(nproc)" ] && echo --oversubscribe || true)
mpirun --quiet $over -n "$ranks" ./train_gpt --train-data "${corpus}_train_*.bin" --val-data "${corpus}_val_*.bin" \
    --model 4x4x128 --seq-len 256 --micro-batch $each "${training[@]}" --sample-tokens 192 \
    --output "$output" --export "$output/model"

# ---- what it is worth, next to what there is to know about the text
late=$(sed -n 's/.*"event":"val".*"loss_late":\([0-9.e+-]*\).*/\1/p' "$output/log.jsonl" | tail -n 1)
loss=$(sed -n 's/.*"event":"val".*"loss":\([0-9.e+-]*\),.*/\1/p' "$output/log.jsonl" | tail -n 1)
ngram=$(data/ngram "$corpus.json" | sed -n 's/.*: \([0-9.]*\) nats.*/\1/p')
lines="--line 'byte 5-gram=$ngram'"
if [ "$data" = stories ]; then
    entropy=$(data/stories --entropy)
    lines="--line entropy=$(awk "BEGIN { print $entropy * log(2) }") $lines"
fi
echo "log and model: $output"
echo "draw it:    scripts/plot.py $output $lines"
echo "try it:     ./train_gpt --model $output/model --steps 0 --sample-tokens 200 --prompt '...'"
if [ "$data" = stories ]; then
    awk -v late="$late" -v ngram="$ngram" -v entropy="$entropy" 'BEGIN {
        bits = late / log(2)
        printf "validation over the second half of the context: %.4f bits per byte = %.3f x the entropy (%.4f), a byte 5-gram: %.4f = %.3f x\n",
            bits, bits / entropy, entropy, ngram / log(2), ngram / log(2) / entropy }'
else
    printf 'validation loss: %.4f nats per byte (second half of the context %.4f); a byte 5-gram: %.4f\n' "$loss" "$late" "$ngram"
fi
