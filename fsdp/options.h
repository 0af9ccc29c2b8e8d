// options: a program's command line from one table. Knows nothing of what the options mean.
//
// GNU style: --name value, --name=value, -x value. Each option at most once. Counts accept k, M, G (decimal). Whatever is
// wrong ends in die() with EXIT_CODE_USAGE and one line that names the option, its value and what was expected; an unknown
// name is answered with the nearest known one.
#ifndef FSDP_OPTIONS_H
#define FSDP_OPTIONS_H

#include <jansson.h> // json_t
#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
    OPTION_TEXT,       // const char **
    OPTION_COUNT,      // int64_t *, least … most
    OPTION_COUNT_AUTO, // the same or "auto", which is 0
    OPTION_NUMBER,     // double *, least … most
    OPTION_CHOICE,     // int *: the place in `choices`, "a,b,c"
    OPTION_FLAG,       // bool *: set when given, no value
} OptionKind;

typedef struct {
    char letter; // 0: none
    const char *name;
    OptionKind kind;
    void *value; // holds the default before, the user's after
    double least, most;
    const char *choices;
    const char *help; // "WHAT meaning": the first word stands for the value
    bool given;
} Option;

// Reads arguments 1 … argc-1 into the table; returns how many do not belong to options and moves those to
// argv[1 …]. With positional false there may be none.
int options_read(Option *options, int count, int argc, char **argv, bool positional);

// The table as --help prints it.
void options_help(const Option *options, int count);

bool options_given(const Option *options, int count, const char *name); // the user gave it

// The options' values as a JSON object, for the log.
json_t *options_json(const Option *options, int count);

#ifdef __cplusplus
}
#endif
#endif
