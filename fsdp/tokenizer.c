#include "tokenizer.h"
#include "error.h"
#include <stdbool.h> // bool
#include <stdlib.h>  // malloc, free
#include <string.h>  // strcmp

struct Tokenizer {
    char bytes[256]; // bytes[i] is the text of token i, so that decode has something to point at
};

Tokenizer *tokenizer_open(const char *name) {
    if (strcmp(name, "bytes") != 0)
        die(EXIT_CODE_USAGE, "use the tokenizer 'bytes'", "tokenizer '%s' is unknown, expected 'bytes'", name);
    Tokenizer *tokenizer = malloc(sizeof *tokenizer);
    if (!tokenizer) die(EXIT_CODE_FAILURE, NULL, "no memory for tokenizer '%s'", name);
    for (int i = 0; i < 256; i++) tokenizer->bytes[i] = (char)(unsigned char)i;
    return tokenizer;
}

void tokenizer_close(Tokenizer *tokenizer) { free(tokenizer); }

int tokenizer_vocab(const Tokenizer *tokenizer) {
    (void)tokenizer;
    return TOKENIZER_BYTES_VOCAB;
}

int tokenizer_eot(const Tokenizer *tokenizer) {
    (void)tokenizer;
    return TOKENIZER_BYTES_EOT;
}

size_t tokenizer_encode(const Tokenizer *tokenizer, const char *text, size_t bytes, int *tokens, size_t capacity) {
    (void)tokenizer;
    size_t written = bytes < capacity ? bytes : capacity;
    for (size_t i = 0; i < written; i++) tokens[i] = (unsigned char)text[i];
    return bytes;
}

const char *tokenizer_decode(const Tokenizer *tokenizer, int token, size_t *bytes) {
    bool is_byte = token >= 0 && token < 256;
    *bytes = is_byte ? 1 : 0;
    return is_byte ? &tokenizer->bytes[token] : "";
}
