#include "options.h"
#include "error.h"
#include <errno.h>  // errno
#include <math.h>   // isfinite
#include <stdint.h> // int64_t
#include <stdio.h>  // printf
#include <stdlib.h> // strtod
#include <string.h> // strcmp

enum { NAME_MAX_LENGTH = 40 };

// Levenshtein's distance: insertions, deletions and replacements from one word to the other.
static int distance(const char *a, const char *b) {
    int row[NAME_MAX_LENGTH + 1], columns = (int)strlen(b);
    if (columns > NAME_MAX_LENGTH) return NAME_MAX_LENGTH;
    for (int j = 0; j <= columns; j++) row[j] = j;
    for (int i = 0; a[i]; i++) {
        int diagonal = row[0];
        row[0] = i + 1;
        for (int j = 1; j <= columns; j++) {
            int above = row[j], replaced = diagonal + (a[i] != b[j - 1]);
            diagonal = above;
            row[j] = above + 1 < row[j - 1] + 1 ? above + 1 : row[j - 1] + 1;
            if (replaced < row[j]) row[j] = replaced;
        }
    }
    return row[columns];
}

static void refuse_unknown(const Option *options, int count, const char *name) {
    const Option *nearest = NULL;
    char hint[96] = "see --help";
    int least = 4;
    for (int i = 0; i < count; i++)
        if (distance(name, options[i].name) < least) {
            nearest = &options[i];
            least = distance(name, nearest->name);
        }
    if (nearest) snprintf(hint, sizeof hint, "did you mean --%s?", nearest->name);
    die(EXIT_CODE_USAGE, hint, "unknown option --%s", name);
}

static double number_of(const Option *option, const char *text, bool suffix) {
    char *end;
    errno = 0;
    double x = strtod(text, &end);
    if (suffix && end != text && *end) {
        double factor = *end == 'k' || *end == 'K' ? 1e3 : *end == 'M' ? 1e6 : *end == 'G' ? 1e9 : 0;
        if (factor > 0) x *= factor, end++;
    }
    if (errno == ERANGE && fabs(x) < 1) errno = 0; // smaller than the smallest: near enough to 0
    if (end == text || *end || errno || !isfinite(x))
        die(EXIT_CODE_USAGE, NULL, "--%s %s: expected a %s%s", option->name, text,
            suffix ? "whole number (k, M and G are understood)" : "number",
            option->kind == OPTION_COUNT_AUTO ? " or auto" : "");
    if (x < option->least || x > option->most)
        die(EXIT_CODE_USAGE, NULL, "--%s %s: expected %.10g to %.10g", option->name, text, option->least,
            option->most);
    if (suffix && x != (double)(int64_t)x)
        die(EXIT_CODE_USAGE, NULL, "--%s %s: expected a whole number", option->name, text);
    return x;
}

static int choice_of(const Option *option, const char *text) {
    size_t length = strlen(text);
    int place = 0;
    for (const char *word = option->choices; *word; place++) {
        size_t n = strcspn(word, ",");
        if (n == length && strncmp(word, text, n) == 0) return place;
        word += n + (word[n] == ',');
    }
    die(EXIT_CODE_USAGE, NULL, "--%s %s: expected one of %s", option->name, text, option->choices);
}

static void option_set(Option *option, const char *text) {
    if (option->given) die(EXIT_CODE_USAGE, NULL, "--%s is given twice", option->name);
    option->given = true;
    switch (option->kind) {
    case OPTION_TEXT:
        *(const char **)option->value = text;
        break;
    case OPTION_COUNT_AUTO:
        if (strcmp(text, "auto") == 0) break;
        *(int64_t *)option->value = (int64_t)number_of(option, text, true);
        break;
    case OPTION_COUNT:
        *(int64_t *)option->value = (int64_t)number_of(option, text, true);
        break;
    case OPTION_NUMBER:
        *(double *)option->value = number_of(option, text, false);
        break;
    case OPTION_CHOICE:
        *(int *)option->value = choice_of(option, text);
        break;
    case OPTION_FLAG:
        *(bool *)option->value = true;
        break;
    }
}

// The option that an argument names; *value is what follows "=", or NULL.
static Option *option_of(Option *options, int count, const char *argument, const char **value) {
    char name[NAME_MAX_LENGTH + 1];
    *value = NULL;
    if (argument[1] != '-') {
        for (int i = 0; i < count; i++)
            if (options[i].letter == argument[1] && argument[2] == '\0') return &options[i];
        die(EXIT_CODE_USAGE, "see --help", "unknown option %s", argument);
    }
    size_t length = strcspn(argument + 2, "=");
    snprintf(name, sizeof name, "%.*s", (int)length, argument + 2);
    if (argument[2 + length] == '=') *value = argument + 2 + length + 1;
    for (int i = 0; i < count; i++)
        if (strcmp(options[i].name, name) == 0) return &options[i];
    refuse_unknown(options, count, name);
    return NULL;
}

int options_read(Option *options, int count, int argc, char **argv, bool positional) {
    int others = 0;
    for (int i = 1; i < argc; i++) {
        const char *value;
        if (argv[i][0] != '-' || argv[i][1] == '\0') {
            if (!positional)
                die(EXIT_CODE_USAGE, "options begin with -- or -", "unexpected argument '%s'", argv[i]);
            argv[1 + others++] = argv[i];
            continue;
        }
        Option *option = option_of(options, count, argv[i], &value);
        if (option->kind == OPTION_FLAG && value)
            die(EXIT_CODE_USAGE, NULL, "--%s takes no value, but has '%s'", option->name, value);
        if (option->kind != OPTION_FLAG && !value) {
            if (i + 1 == argc) die(EXIT_CODE_USAGE, NULL, "--%s needs a value", option->name);
            value = argv[++i];
        }
        option_set(option, value);
    }
    return others;
}

void options_help(const Option *options, int count) {
    for (int i = 0; i < count; i++) {
        const Option *option = &options[i];
        const char *meaning = strchr(option->help, ' ');
        char left[64], letter[8] = "    ";
        if (option->letter) snprintf(letter, sizeof letter, "-%c, ", option->letter);
        int word = option->kind == OPTION_FLAG ? 0 : (int)(meaning - option->help);
        snprintf(left, sizeof left, "%s--%s %.*s", letter, option->name, word, option->help);
        printf("  %-34s %s\n", left, option->kind == OPTION_FLAG ? option->help : meaning + 1);
    }
}

bool options_given(const Option *options, int count, const char *name) {
    for (int i = 0; i < count; i++)
        if (strcmp(options[i].name, name) == 0) return options[i].given;
    return false;
}

json_t *options_json(const Option *options, int count) {
    json_t *object = json_object(), *value = NULL;
    for (int i = 0; i < count; i++) {
        const Option *option = &options[i];
        const char *text = option->kind == OPTION_TEXT ? *(const char **)option->value : NULL,
                   *word = option->choices;
        switch (option->kind) {
        case OPTION_TEXT:
            value = text ? json_string(text) : json_null();
            break;
        case OPTION_COUNT:
        case OPTION_COUNT_AUTO:
            value = json_integer(*(int64_t *)option->value);
            break;
        case OPTION_NUMBER:
            value = json_real(*(double *)option->value);
            break;
        case OPTION_FLAG:
            value = json_boolean(*(bool *)option->value);
            break;
        case OPTION_CHOICE:
            for (int skip = *(int *)option->value; skip > 0; skip--) word += strcspn(word, ",") + 1;
            value = json_stringn(word, strcspn(word, ","));
            break;
        }
        json_object_set_new(object, option->name, value ? value : json_null());
    }
    return object;
}
