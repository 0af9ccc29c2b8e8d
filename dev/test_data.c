// test_data: the tools of data/, run as a user runs them, from the repository's root.
//
// Everything happens in a fresh folder, $T in the commands below; standard output and error of the latest command are
// its files out and err. Grammar and probabilities of the stories are written down here a second time, so that
// data/stories is held against something that shares no line with it.
#include <math.h>    // log2, sqrt
#include <setjmp.h>  // cmocka
#include <stdarg.h>  // cmocka, va_list
#include <stdbool.h> // bool
#include <stddef.h>  // cmocka
#include <stdint.h>  // cmocka
#include <stdio.h>   // fopen, popen
#include <stdlib.h>  // system, mkdtemp, setenv
#include <string.h>  // strstr, memcmp
#include <sys/wait.h>
#include <cmocka.h>

// ---------------------------------------------------------------------------------------------------------------------
// Running tools

// Runs a shell command, formatted like printf, and returns its exit code.
__attribute__((format(printf, 1, 2))) static int run(const char *format, ...) {
    char command[2048], line[2200];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(command, sizeof command, format, arguments);
    va_end(arguments);
    snprintf(line, sizeof line, "{ %s\n} >\"$T/out\" 2>\"$T/err\"", command);
    int status = system(line);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

// A file of the test's folder, ended by a 0; to be freed.
static char *file_read(const char *name, size_t *size) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s", getenv("T"), name);
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    assert_int_equal(fseek(file, 0, SEEK_END), 0);
    *size = (size_t)ftell(file);
    rewind(file);
    char *bytes = malloc(*size + 1);
    assert_non_null(bytes);
    assert_int_equal(fread(bytes, 1, *size, file), *size);
    bytes[*size] = '\0';
    fclose(file);
    return bytes;
}

// Whether a file of the test's folder has the text in it.
static bool file_has(const char *name, const char *text) {
    size_t size;
    char *bytes = file_read(name, &size);
    bool found = strstr(bytes, text) != NULL;
    free(bytes);
    return found;
}

// The number that stands behind `key` in the output of the latest command, or first if there is no key.
static double out_number(const char *key) {
    size_t size;
    char *bytes = file_read("out", &size), *at = key ? strstr(bytes, key) : bytes;
    assert_non_null(at);
    double number = strtod(at + (key ? strlen(key) : 0), NULL);
    free(bytes);
    return number;
}

// Runs a command that must be refused: exit code, one line, and that line says `why`.
static void refuse(int code, const char *why, const char *command) {
    int found = run("%s", command);
    size_t size;
    char *line = file_read("err", &size);
    if (found != code || !strstr(line, why) || strchr(line, '\n') != line + size - 1) {
        fail_msg("%s: expected exit %d and '%s', found %d and '%s'", command, code, why, found, line);
    }
    free(line);
}

static int folder_make(void **state) {
    (void)state;
    static char folder[] = "/tmp/test_data.XXXXXX";
    return mkdtemp(folder) && setenv("T", folder, 1) == 0 ? 0 : -1;
}

static int folder_remove(void **state) {
    (void)state;
    return system("rm -rf \"$T\"");
}

// ---------------------------------------------------------------------------------------------------------------------
// Stories

static void test_stories_depend_on_the_seed_alone(void **state) {
    (void)state;
    assert_int_equal(run("data/stories --seed 7 --bytes 20k >$T/a; data/stories --seed=7 --bytes=20k | cmp $T/a"),
                     0);
    assert_int_equal(run("data/stories --seed 7 | head -c $(wc -c <$T/a) | cmp $T/a"), 0);
    assert_int_equal(run("data/stories --seed 8 --bytes 20k | cmp -s $T/a"), 1);
    assert_int_equal(run("data/stories --bytes 1"), 0);
    size_t size;
    char *story = file_read("out", &size);
    assert_string_equal(story,
                        "Bel, Kat, Sot and Lol met Gib. Gib had 686 gold vases. The vases sold for 5154 to Wav. "
                        "Wav likes gold.\n\n");
    free(story);
}

// A word of a list that ends where the text goes on with a space or a full stop.
static bool word_read(const char **text, const char *list, char word[8]) {
    size_t length = strcspn(*text, " .");
    char quoted[12];
    if (length > 7) return false;
    snprintf(word, 8, "%.*s", (int)length, *text);
    snprintf(quoted, sizeof quoted, " %s ", word);
    *text += length;
    return strstr(list, quoted) != NULL;
}

static bool literal_read(const char **text, const char *literal) {
    size_t length = strlen(literal);
    bool same = strncmp(*text, literal, length) == 0;
    *text += same ? length : 0;
    return same;
}

static bool digits_read(const char **text, size_t digits) {
    bool good = strspn(*text, "0123456789") == digits && **text != '0';
    *text += digits;
    return good;
}

// A name nobody else's initial begins.
static bool name_read(const char **text, char used[8], double *bits, char name[4]) {
    const char *t = *text;
    size_t people = strlen(used);
    if (!t[0] || !strchr("BDFGHJKLMNPRSVWZ", t[0]) || strchr(used, t[0])) return false;
    if (!t[1] || !strchr("aeio", t[1]) || !t[2] || !strchr("bdlmnrtv", t[2]) || people > 5) return false;
    used[people] = t[0];
    snprintf(name, 4, "%.3s", t);
    *bits += log2((double)(16 - people) * 4 * 8);
    *text += 3;
    return true;
}

// "Kim, Bob and Ned met Ron."
static bool opening_read(const char **text, char used[8], double *bits, char seller[4]) {
    char friend[4];
    int friends = 0;
    bool last = false; // the friend behind "and"
    do {
        if (!name_read(text, used, bits, friend)) return false;
        friends++;
        if (last || strncmp(*text, " met ", 5) == 0) break;
        last = strncmp(*text, " and ", 5) == 0;
    } while (literal_read(text, last ? " and " : ", "));
    *bits += 2; // one to four friends
    return friends <= 4 && last == (friends > 1) && literal_read(text, " met ") &&
           name_read(text, used, bits, seller) && literal_read(text, ". ");
}

// "Max likes red." or "Max is happy now."
static bool ending_read(const char **text, const char *seller, const char *buyer, const char *colour,
                        double *bits) {
    char word[8];
    if (literal_read(text, buyer)) {
        if (literal_read(text, " likes ")) {
            *bits += 1;
            return literal_read(text, colour) && literal_read(text, ".");
        }
        *bits += log2(8.0 / 3);
    } else if (literal_read(text, seller)) {
        *bits += 3;
    } else {
        return false;
    }
    *bits += 3;
    return literal_read(text, " is ") && word_read(text, " calm glad happy lucky proud sad shy tired ", word) &&
           literal_read(text, " now.");
}

// Reads one story, checks what it says against what it said before, and adds its -log2 probability to *bits.
static bool story_read(const char **text, double *bits) {
    static const char colours[] = " black blue gold green grey pink red white ";
    static const char things[] =
        " bags cups dolls eggs figs hats jars keys lamps nuts oars pens rings socks toys vases ";
    char used[8] = "", seller[4], buyer[4], colour[8], thing[8];
    *bits += log2(900) + 3 + 4 + log2(9000); // count, colour, things, price
    return opening_read(text, used, bits, seller) && literal_read(text, seller) && literal_read(text, " had ") &&
           digits_read(text, 3) && literal_read(text, " ") && word_read(text, colours, colour) &&
           literal_read(text, " ") && word_read(text, things, thing) && literal_read(text, ". The ") &&
           literal_read(text, thing) && literal_read(text, " sold for ") && digits_read(text, 4) &&
           literal_read(text, " to ") && name_read(text, used, bits, buyer) && literal_read(text, ". ") &&
           ending_read(text, seller, buyer, colour, bits) && literal_read(text, "\n\n");
}

// The mean of -log2 P over the stories' tokens is an estimate of what --entropy computes; with residuals
// bits - entropy · tokens its standard error is known, and five of them are allowed.
static void test_stories_follow_their_grammar_and_entropy(void **state) {
    (void)state;
    size_t size;
    double sum_bits = 0, sum_tokens = 0, squares = 0, stories = 0;
    assert_int_equal(run("data/stories --entropy"), 0);
    double entropy = out_number(NULL);
    assert_true(entropy > 0.5 && entropy < 1.5);
    assert_int_equal(run("data/stories --seed 3 --bytes 20M"), 0);
    char *all = file_read("out", &size);
    for (const char *text = all; *text; stories++) {
        const char *start = text;
        double bits = 0;
        if (!story_read(&text, &bits)) fail_msg("not a story: %.128s", start);
        double tokens = (double)(text - start) - 2 + 1; // without the blank line, with end-of-text
        assert_true(tokens <= 128);
        sum_bits += bits;
        sum_tokens += tokens;
        squares += (bits - entropy * tokens) * (bits - entropy * tokens);
    }
    free(all);
    assert_true(stories > 200000);
    assert_true(fabs(sum_bits / sum_tokens - entropy) < 5 * sqrt(squares) / sum_tokens + 1e-6);
}

static void test_stories_need_more_memory_than_a_5_gram(void **state) {
    (void)state;
    assert_int_equal(run("data/stories --entropy"), 0);
    double entropy = out_number(NULL);
    assert_int_equal(
        run("data/stories --bytes 10M | data/tokenize --output $T/s --documents '\\n\\n' --val-fraction 0.05"), 0);
    assert_int_equal(run("data/ngram $T/s.json"), 0);
    assert_true(out_number("nats/token, ") > 1.2 * entropy);
    assert_int_equal(run("data/ngram --order 7 $T/s.json"), 0);
    assert_true(out_number("nats/token, ") > entropy);
}

// ---------------------------------------------------------------------------------------------------------------------
// Tokenizing

static void test_tokenize_gives_back_the_text(void **state) {
    (void)state;
    assert_int_equal(run("head -c 300000 /dev/urandom >$T/a; printf 'one\\n\\ntwo\\nthree' >$T/b"), 0);
    assert_int_equal(
        run("data/tokenize --output $T/r $T/a && data/tokenize --decode $T/r_train_000000.bin | cmp $T/a"), 0);
    assert_int_equal(run("data/tokenize --output $T/r --documents line $T/b && data/tokenize --verify $T/r.json"),
                     0);
    assert_true(file_has("r.json", "\"documents\": 3"));
    assert_int_equal(run("data/tokenize --decode $T/r_train_000000.bin"), 0);
    assert_true(file_has("out", "onetwothree"));
    assert_int_equal(run("data/tokenize --output $T/r --documents '\\n\\n' $T/b"), 0);
    size_t size;
    char *shard = file_read("r_train_000000.bin", &size);
    static const uint16_t expected[] = {256, 'o', 'n', 'e', 256, 't', 'w', 'o', '\n', 't', 'h', 'r', 'e', 'e'};
    static const int32_t header[3] = {20240520, 1, sizeof expected / sizeof *expected};
    assert_int_equal(size, 1024 + sizeof expected);
    assert_memory_equal(shard, header, sizeof header);
    assert_memory_equal(shard + 1024, expected, sizeof expected);
    free(shard);
    assert_true(file_has("r.json", "\"vocab_size\": 257") && file_has("r.json", "\"eot\": 256"));
    assert_true(file_has("r.json", "\"tokenizer\": \"bytes\"") && file_has("r.json", "\"bytes\": 12"));
}

// A separator that begins in one read and ends in the next, at every place around the border between two.
static void test_tokenize_finds_separators_anywhere(void **state) {
    (void)state;
    for (int at = 65530; at < 65540; at++) {
        assert_int_equal(run("{ head -c %d /dev/zero; printf 'ENDx'; } >$T/a", at), 0);
        assert_int_equal(run("data/tokenize --output $T/r --documents END $T/a"), 0);
        assert_true(file_has("r.json", "\"documents\": 2"));
    }
}

static void test_tokenize_splits_as_asked(void **state) {
    (void)state;
    assert_int_equal(run("seq 100 199 >$T/a"), 0);
    assert_int_equal(run("data/tokenize --output $T/r --documents line --val-fraction 0.1 $T/a"), 0);
    assert_int_equal(run("data/tokenize --decode $T/r_val_000000.bin"), 0);
    assert_true(file_has("out", "190191192193194195196197198199"));
    assert_int_equal(run("tr -d '\\n' <$T/a | data/tokenize --output $T/r --val-fraction 0.1"), 0);
    assert_int_equal(run("data/tokenize --decode $T/r_val_000000.bin"), 0);
    assert_true(file_has("out", "190191192193194195196197198199"));
    assert_int_equal(run("data/tokenize --verify $T/r.json"), 0);
    const char *drawn = "data/tokenize --documents line --val-fraction 0.1 $T/a --output $T/r --val-seed";
    assert_int_equal(
        run("%s 5; data/tokenize --decode $T/r_val_000000.bin >$T/b; data/tokenize --verify $T/r.json", drawn), 0);
    assert_int_equal(
        run("test $(wc -c <$T/b) = 30 && %s 5 && data/tokenize --decode $T/r_val_000000.bin | cmp $T/b", drawn), 0);
    assert_int_equal(run("%s 6; data/tokenize --decode $T/r_val_000000.bin | cmp -s $T/b", drawn), 1);
}

static void test_tokenize_fills_shards(void **state) {
    (void)state;
    assert_int_equal(run("head -c 10000 /dev/zero | data/tokenize --output $T/m --shard-tokens 3k -"), 0);
    assert_int_equal(run("cd $T; stat -c %%s m_train_*.bin | tr '\\n' ' '; ls m_train_* | wc -l"), 0);
    assert_true(file_has("out", "7024 7024 7024 3026 4"));
    assert_int_equal(run("data/tokenize --verify $T/m.json"), 0);
    assert_int_equal(run("echo less | data/tokenize --output $T/m; ls $T | grep -c m_train"), 0);
    assert_int_equal(run("test $(ls $T/m_train_* | wc -l) = 1; data/tokenize --verify $T/m.json"), 0);
    assert_int_equal(run("ls -A $T | grep -e tmp -e spool"), 1);
}

static void test_tokenize_reads_folders_in_order(void **state) {
    (void)state;
    assert_int_equal(
        run("mkdir -p $T/f/b; printf 1 >$T/f/a; printf 2 >$T/f/b/a; printf 3 >$T/f/b/b; printf 4 >$T/f/c; : >$T/f/d"),
        0);
    assert_int_equal(run("data/tokenize --output $T/r $T/f $T/f/a && data/tokenize --decode $T/r_train_000000.bin"),
                     0);
    assert_true(file_has("out", "12341"));
    assert_true(file_has("r.json", "\"documents\": 5"));
}

static void test_tokenize_refuses(void **state) {
    (void)state;
    assert_int_equal(run("echo text >$T/a; : >$T/empty"), 0);
    refuse(2, "expected text, found none", "data/tokenize --output $T/r $T/empty");
    refuse(2, "did you mean --val-fraction?", "data/tokenize --output $T/r --val-fractoin 0.1 $T/a");
    refuse(2, "--output is given twice", "data/tokenize --output $T/r --output=$T/q $T/a");
    refuse(2, "--val-seed needs a value", "data/tokenize --output $T/r $T/a --val-seed");
    refuse(2, "--val-fraction 1.5", "data/tokenize --output $T/r --val-fraction 1.5 $T/a");
    refuse(2, "--shard-tokens 3x", "data/tokenize --output $T/r --shard-tokens 3x $T/a");
    refuse(2, "--shard-tokens 0: expected 1 to", "data/tokenize --output $T/r --shard-tokens 0 $T/a");
    refuse(2, "found '\\q'", "data/tokenize --output $T/r --documents 'a\\q' $T/a");
    refuse(2, "--val-seed expects --val-fraction", "data/tokenize --output $T/r --val-seed 1 $T/a");
    refuse(2, "found only one", "data/tokenize --output $T/r --val-seed 1 --val-fraction 0.1 $T/a");
    refuse(2, "no-such", "data/tokenize --output $T/r --tokenizer no-such $T/a");
    refuse(2, "cannot read", "data/tokenize --output $T/r $T/no-such");
    refuse(2, "does the folder exist?", "data/tokenize --output $T/no-such/r $T/a");
    refuse(2, "--output NAME is missing", "data/tokenize $T/a");
    refuse(2, "stand alone", "data/tokenize --verify $T/r.json --output $T/r");
    refuse(2, "did you mean --seed?", "data/stories --sed 1x");
    refuse(2, "--seed 1x: expected", "data/stories --seed 1x");
    refuse(2, "--order 8: expected 1 to 7", "data/ngram --order 8 $T/r.json");
    refuse(2, "found 0", "data/ngram");
}

static void test_a_full_disk_is_a_failure(void **state) {
    (void)state;
    refuse(1, "No space left", "data/stories --bytes 1M >/dev/full");
    refuse(1, "No space left", "data/stories --bytes 10 >/dev/full");
    refuse(1, "No space left", "data/stories --entropy >/dev/full");
    assert_int_equal(run("echo text | data/tokenize --output $T/r"), 0);
    refuse(1, "No space left", "data/tokenize --decode $T/r_train_000000.bin >/dev/full");
    // A limit on the size of files stands in for a disk: first the spool does not fit, then a shard with its header.
    refuse(1, "cannot write",
           "(trap '' XFSZ; ulimit -f 4; head -c 9000 /dev/zero | data/tokenize --output $T/full)");
    refuse(1, "cannot write",
           "(trap '' XFSZ; ulimit -f 8; head -c 2000 /dev/zero | data/tokenize --output $T/full)");
    assert_int_equal(run("ls $T | grep full"), 1);
}

static void test_verify_finds_damage(void **state) {
    (void)state;
    const char *write =
        "seq 9999 | data/tokenize --output $T/v --documents line --val-fraction 0.1 --shard-tokens 20k";
    static const char *const damage[][2] = {
        {"printf x | dd of=$T/v_train_000001.bin bs=1 seek=5002 conv=notrunc", "expected hash"},
        {"printf xx | dd of=$T/v_train_000000.bin bs=1 seek=5000 conv=notrunc", "expected tokens below 257"},
        {"printf a | dd of=$T/v_val_000000.bin bs=1 seek=1024 conv=notrunc", "found 353"},
        {"printf x | dd of=$T/v_val_000000.bin bs=1 conv=notrunc", "expected magic"},
        {"truncate -s -2 $T/v_train_000001.bin", "bytes for 20000 tokens"},
        {"truncate -s 100 $T/v_train_000001.bin", "expected a header"},
        {"rm $T/v_train_000001.bin", "cannot open"},
        {"cp $T/v_val_000000.bin $T/v_val_000001.bin", "remove it"},
        {"sed -i 's/\"documents\": 9[0-9]*,/\"documents\": 1,/' $T/v.json", "expected 1 documents"},
    };
    for (size_t i = 0; i < sizeof damage / sizeof *damage; i++) {
        assert_int_equal(run("%s && data/tokenize --verify $T/v.json", write), 0);
        assert_int_equal(run("%s", damage[i][0]), 0);
        refuse(1, damage[i][1], "data/tokenize --verify $T/v.json");
        assert_int_equal(run("rm $T/v_*"), 0);
    }
    refuse(2, "expects NAME.json", "data/tokenize --verify $T/v");
    refuse(2, "expected a number", "echo '{}' >$T/v.json; data/tokenize --verify $T/v.json");
}

// ---------------------------------------------------------------------------------------------------------------------
// N-grams. The tool itself ends with 1 where the probabilities behind a context do not sum to one.

static void test_ngram_cannot_foresee_noise(void **state) {
    (void)state;
    assert_int_equal(run("head -c 200000 /dev/urandom | data/tokenize --output $T/n --val-fraction 0.1"), 0);
    for (int order = 1; order <= 7; order++) {
        assert_int_equal(run("data/ngram --order %d $T/n.json", order), 0);
        assert_true(out_number("nats/token, ") > 7.99 && out_number("nats/token, ") < 8.2);
    }
}

// Counts that can be done by hand: eight documents "ab" in training, two in validation. Of unigrams, each was met
// behind one other token: c = 1, C = 3. Of bigrams, "eot a" and "a b" occurred 8 times, "b eot" 7 times. There is nothing to
// estimate discounts from, so Dk = k/2.
static void test_ngram_counts_by_hand(void **state) {
    (void)state;
    assert_int_equal(run("yes ab | head -n 10 | data/tokenize --output $T/h --documents line --val-fraction 0.2"),
                     0);
    assert_int_equal(run("data/ngram --order 2 $T/h.json"), 0);
    double unigram = (1 - 0.5) / 3 + 3 * 0.5 / 3 / 257;
    double eight = (8 - 1.5 + 1.5 * unigram) / 8, seven = (7 - 1.5 + 1.5 * unigram) / 7;
    double nats = -(4 * log(eight) + log(seven)) / 5; // targets: a, b, end-of-text, a, b
    assert_true(fabs(out_number("order 2: ") - nats) < 1e-6);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_stories_depend_on_the_seed_alone),
        cmocka_unit_test(test_stories_follow_their_grammar_and_entropy),
        cmocka_unit_test(test_stories_need_more_memory_than_a_5_gram),
        cmocka_unit_test(test_tokenize_gives_back_the_text),
        cmocka_unit_test(test_tokenize_finds_separators_anywhere),
        cmocka_unit_test(test_tokenize_splits_as_asked),
        cmocka_unit_test(test_tokenize_fills_shards),
        cmocka_unit_test(test_tokenize_reads_folders_in_order),
        cmocka_unit_test(test_tokenize_refuses),
        cmocka_unit_test(test_a_full_disk_is_a_failure),
        cmocka_unit_test(test_verify_finds_damage),
        cmocka_unit_test(test_ngram_cannot_foresee_noise),
        cmocka_unit_test(test_ngram_counts_by_hand),
    };
    return cmocka_run_group_tests(tests, folder_make, folder_remove);
}
