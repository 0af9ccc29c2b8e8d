// loader: token shards on disk → micro-batches of inputs and targets, in one order for any number of ranks.
//
// Shards are memory-mapped, read-only, one after the other in name order. Sequence k of a set is tokens k·T … k·T+T-1
// of its shards and its targets are one further, so a sequence reads T+1 tokens; a sequence never crosses a shard.
//
//     shard A  |--seq 0--|--seq 1--|--seq 2--|rest|   shard B  |--seq 3--|--seq 4--|rest|
//
// In training the rest of a shard (fewer than T targets) is left out and reported by loader_leftover. In evaluation
// every target counts: the rest is one more, shorter sequence whose missing targets are -1.
//
// An epoch is every sequence once. Position n (64 bit, counted from the start of training) lies in epoch n / S at
// place n % S, S sequences an epoch. With shuffling the place goes through a permutation of 0 … S-1 drawn from
// (seed, epoch): a keyed Feistel network with cycle walking, so any position is found in constant time and memory and
// there is no state to save but n. The Feistel round function is Philox4x32-10 (Salmon et al., "Parallel random
// numbers: as easy as 1, 2, 3", SC11).
//
// The room knows nothing of the model or of ranks: whoever asks says which positions it wants.
//
// Formats: 16-bit shards (magic 20240520, version 1) and 32-bit shards (magic 20240801, version 7); a header of 256
// int32, h[2] tokens, then exactly that many tokens; little-endian. Anything else ends in die() with EXIT_CODE_USAGE,
// naming file, expected and found.
#ifndef FSDP_LOADER_H
#define FSDP_LOADER_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct Loader Loader;

typedef struct {
    const char *option; // the option the glob came from, for messages: "--train-data"
    const char *glob;   // shell pattern of shard files (glob(3)); one match at least
    int64_t T;          // tokens per sequence
    int64_t vocab;      // a token id at or beyond this ends the run, naming shard and position
    bool every_target;  // evaluation: the short rest of a shard is a sequence too
    bool shuffle;       // permute each epoch
    uint64_t seed;      // of the permutation
} LoaderOptions;

// Opens and checks every shard (header, size). Dies if there is none, or not one whole sequence (training) or not one
// target (evaluation).
Loader *loader_open(LoaderOptions options);
void loader_close(Loader *loader);

int64_t loader_sequences(const Loader *loader); // S: sequences in an epoch
int64_t loader_tokens(const Loader *loader);    // tokens in all shards
int64_t loader_targets(const Loader *loader);   // targets an epoch visits
int64_t loader_leftover(const Loader *loader);  // targets an epoch never visits (training; 0 in evaluation)
int loader_shards(const Loader *loader);

// The sequence at position n: which of the S sequences it is. Constant time.
int64_t loader_sequence_at(const Loader *loader, int64_t n);

// Fills inputs and targets (B, T) with the sequences at positions n, n+1, … n+B-1 and returns how many targets are not
// -1. In evaluation positions at or beyond S give rows of input 0 and target -1, so that a short last batch needs no
// special case. Tokens are checked against vocab.
int64_t loader_batch(const Loader *loader, int64_t n, int B, int *inputs, int *targets);

#ifdef __cplusplus
}
#endif
#endif
