// tokenizer: bytes ↔ tokens. Knows nothing else.
//
// The byte tokenizer: token i is byte i for i < 256, 256 is end-of-text, which stands before each document.
#ifndef FSDP_TOKENIZER_H
#define FSDP_TOKENIZER_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { TOKENIZER_BYTES_VOCAB = 257, TOKENIZER_BYTES_EOT = 256 };

typedef struct Tokenizer Tokenizer;

// name: "bytes". Dies with EXIT_CODE_USAGE on anything it cannot read.
Tokenizer *tokenizer_open(const char *name);
void tokenizer_close(Tokenizer *tokenizer);

int tokenizer_vocab(const Tokenizer *tokenizer);
int tokenizer_eot(const Tokenizer *tokenizer); // the id that stands before each document

// Appends at most capacity tokens of text[0 … bytes-1] to tokens; returns how many the text has in all.
size_t tokenizer_encode(const Tokenizer *tokenizer, const char *text, size_t bytes, int *tokens, size_t capacity);

// The bytes of one token and their number; end-of-text and ids out of range have none.
const char *tokenizer_decode(const Tokenizer *tokenizer, int token, size_t *bytes);

#ifdef __cplusplus
}
#endif
#endif
