// stories: endless small stories whose entropy is known exactly, so that a model's loss has a floor to be held against.
//
//     data/stories --bytes 10M > stories.txt      at least that many bytes, whole stories only
//     data/stories --entropy                      bits per token that no model can beat
//
// A story is four sentences, at most 105 bytes. Each sentence is drawn from the shapes of its table below; in a shape,
// {+slot} is a new choice, uniform over what the slot can hold, and {slot} repeats the choice made before:
//
//     Kim, Bob and Ned met Ron. Ron had 584 red hats. The hats sold for 2852 to Max. Max likes red.
//     friends, new         seller again all new           again         price   buyer again   again
//
// People of one story differ in their initial. Stories are separated by a blank line. Where a choice is repeated a
// reader who remembers pays nothing, and one who sees only a few bytes pays for it again: that is the whole game.
//
// Unambiguous. Read a story from the left, knowing its beginning. The shapes of a table part at a byte: "," or " and"
// or " met" behind a name; the initial of seller or buyer, which differ; "likes" or "is". Of a slot's words none is the
// beginning of another. Everything else is literal text or repeats what is known. So each byte is either forced or
// reveals part of one choice, no text has two derivations, and
//
//     -log2 P(text) = the sum over its choices of -log2 of their probabilities.
//
// Entropy. The text is a sequence of independent stories, so by renewal it has E[bits of a story] / E[tokens of a
// story] bits per token. A token is a byte, and each story has one more, the end-of-text that stands before it. Both
// expectations are sums over the sentences, weighted by how likely it is that n people have been named before: on
// nothing else depends how many choices there are. All words of a slot are equally likely wherever it stands, so its
// mean length is theirs.
#include <assert.h>           // assert
#include <errno.h>            // errno
#include <math.h>             // log2
#include <stdbool.h>          // bool
#include <stdint.h>           // uint64_t
#include <stdio.h>            // printf, fwrite
#include <string.h>           // memcpy, strlen
#include <Random123/philox.h> // philox4x32
#include "error.h"            // die
#include "options.h"          // options_read

// ---------------------------------------------------------------------------------------------------------------------
// The grammar

enum { INITIALS = 16, VOWELS = 4, ENDS = 8, NAME = 3, STORY_MAX = 127, SENTENCES = 4, SHAPES = 4, PEOPLE_MAX = 6 };

// A name is an initial, a vowel and an end.
static const char initials[INITIALS + 1] = "BDFGHJKLMNPRSVWZ", vowels[VOWELS + 1] = "aeio",
                                      ends[ENDS + 1] = "bdlmnrtv";
static const char *const colours[] = {"black", "blue", "gold", "green", "grey", "pink", "red", "white"};
static const char *const things[] = {"bags",  "cups", "dolls", "eggs", "figs",  "hats",  "jars", "keys",
                                     "lamps", "nuts", "oars",  "pens", "rings", "socks", "toys", "vases"};
static const char *const moods[] = {"calm", "glad", "happy", "lucky", "proud", "sad", "shy", "tired"};

typedef enum { FRIEND, SELLER, BUYER, COUNT, COLOUR, THINGS, PRICE, MOOD, SLOTS } Slot;

// What a slot is filled with: one of its words, or a number, or else a person.
static const struct {
    const char *name;
    const char *const *words;
    unsigned count; // of words or numbers
    unsigned first; // number; all have as many digits
} slots[SLOTS] = {
    [FRIEND] = {.name = "friend"},
    [SELLER] = {.name = "seller"},
    [BUYER] = {.name = "buyer"},
    [COUNT] = {.name = "count", .first = 100, .count = 900},
    [COLOUR] = {.name = "colour", .words = colours, .count = sizeof colours / sizeof *colours},
    [THINGS] = {.name = "things", .words = things, .count = sizeof things / sizeof *things},
    [PRICE] = {.name = "price", .first = 1000, .count = 9000},
    [MOOD] = {.name = "mood", .words = moods, .count = sizeof moods / sizeof *moods},
};

typedef struct {
    int eighths;      // the shape's probability in eighths; a table's sum to 8
    const char *text; // NULL: no further shape
} Shape;

static const Shape sentences[SENTENCES][SHAPES] = {
    {{2, "{+friend} met {+seller}."},
     {2, "{+friend} and {+friend} met {+seller}."},
     {2, "{+friend}, {+friend} and {+friend} met {+seller}."},
     {2, "{+friend}, {+friend}, {+friend} and {+friend} met {+seller}."}},
    {{8, " {seller} had {+count} {+colour} {+things}."}},
    {{8, " The {things} sold for {+price} to {+buyer}."}},
    {{4, " {buyer} likes {colour}."}, {3, " {buyer} is {+mood} now."}, {1, " {seller} is {+mood} now."}},
};

static bool slot_is_person(Slot slot) { return slots[slot].count == 0; }

// How many choices a slot has once `people` people are named, whose initials are taken.
static unsigned slot_choices(Slot slot, int people) {
    return slot_is_person(slot) ? (unsigned)(INITIALS - people) * VOWELS * ENDS : slots[slot].count;
}

// Reads "{+name}" or "{name}" at text; returns what follows it.
static const char *slot_read(const char *text, Slot *slot, bool *new) {
    *new = text[1] == '+';
    const char *name = text + 1 + *new;
    size_t length = strcspn(name, "}");
    for (int s = 0; s < SLOTS; s++) {
        if (strlen(slots[s].name) == length && memcmp(slots[s].name, name, length) == 0) {
            *slot = (Slot)s;
            return name + length + 1;
        }
    }
    die(EXIT_CODE_FAILURE, NULL, "the grammar has no slot named '%.*s'", (int)length, name);
}

// ---------------------------------------------------------------------------------------------------------------------
// Telling one

// The n-th number of a story is a function of (seed, story, n) alone.
typedef struct {
    uint64_t seed, story;
    uint32_t drawn; // numbers drawn so far
} Dice;

static uint32_t dice_next(Dice *dice) {
    philox4x32_key_t key = {{(uint32_t)dice->seed, (uint32_t)(dice->seed >> 32)}};
    philox4x32_ctr_t counter = {{dice->drawn / 4, 0, (uint32_t)dice->story, (uint32_t)(dice->story >> 32)}};
    return philox4x32(counter, key).v[dice->drawn++ % 4];
}

// Uniform in 0 … sides-1, exactly: what does not divide evenly is thrown again.
static uint32_t dice_throw(Dice *dice, uint32_t sides) {
    uint32_t unfair = UINT32_MAX - UINT32_MAX % sides, number;
    do number = dice_next(dice);
    while (number >= unfair);
    return number % sides;
}

typedef struct {
    char words[SLOTS][8]; // what each slot last chose
    bool used[INITIALS];  // by the people named
    int people;           // how many those are
    char text[STORY_MAX + 1];
    size_t length;
} Story;

static void story_add(Story *story, const char *text, size_t length) {
    assert(story->length + length <= STORY_MAX);
    memcpy(story->text + story->length, text, length);
    story->length += length;
}

// A name whose initial is the one that `choice` counts among those that are not used.
static void story_name(Story *story, char *word, uint32_t choice) {
    uint32_t rank = choice / (VOWELS * ENDS), initial = 0;
    while (story->used[initial] || rank-- > 0) initial++;
    story->used[initial] = true;
    story->people++;
    word[0] = initials[initial];
    word[1] = vowels[choice / ENDS % VOWELS];
    word[2] = ends[choice % ENDS];
    word[NAME] = '\0';
}

static void story_choose(Story *story, Slot slot, Dice *dice) {
    char *word = story->words[slot];
    uint32_t choice = dice_throw(dice, slot_choices(slot, story->people));
    if (slot_is_person(slot)) {
        story_name(story, word, choice);
    } else if (slots[slot].words) {
        strcpy(word, slots[slot].words[choice]);
    } else {
        snprintf(word, sizeof story->words[slot], "%u", (slots[slot].first + choice) % 10000);
    }
}

static const char *sentence_choose(const Shape shapes[SHAPES], Dice *dice) {
    int number = (int)dice_throw(dice, 8), s = 0;
    while ((number -= shapes[s].eighths) >= 0) s++;
    return shapes[s].text;
}

static void story_tell(Story *story, Dice *dice) {
    memset(story, 0, sizeof *story);
    for (int i = 0; i < SENTENCES; i++) {
        const char *text = sentence_choose(sentences[i], dice);
        while (*text) {
            size_t literal = strcspn(text, "{");
            story_add(story, text, literal);
            text += literal;
            if (!*text) break;
            Slot slot;
            bool new;
            text = slot_read(text, &slot, &new);
            if (new) story_choose(story, slot, dice);
            story_add(story, story->words[slot], strlen(story->words[slot]));
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Its entropy

// Bits and bytes of a piece of a story: expectations, so they add up.
typedef struct {
    double bits, bytes;
} Measure;

static double slot_mean_length(Slot slot) {
    if (slot_is_person(slot)) return NAME;
    if (!slots[slot].words) return snprintf(NULL, 0, "%u", slots[slot].first);
    double sum = 0;
    for (unsigned i = 0; i < slots[slot].count; i++) sum += (double)strlen(slots[slot].words[i]);
    return sum / slots[slot].count;
}

// One shape, told when *people people are named; *people becomes how many there are after it.
static Measure shape_measure(Shape shape, int *people) {
    Measure measure = {.bits = -log2(shape.eighths / 8.0), .bytes = 0};
    for (const char *text = shape.text; *text;) {
        if (*text != '{') {
            measure.bytes++;
            text++;
            continue;
        }
        Slot slot;
        bool new;
        text = slot_read(text, &slot, &new);
        measure.bytes += slot_mean_length(slot);
        if (new) {
            measure.bits += log2(slot_choices(slot, *people));
            *people += slot_is_person(slot);
        }
    }
    return measure;
}

// chance[n] is the probability that n people are named when a sentence begins.
static double story_entropy(void) {
    double chance[PEOPLE_MAX + 1] = {1}, bits = 0, tokens = 1; // 1: end-of-text
    for (int i = 0; i < SENTENCES; i++) {
        double after[PEOPLE_MAX + 1] = {0};
        for (int n = 0; n <= PEOPLE_MAX; n++) {
            for (int s = 0; chance[n] > 0 && s < SHAPES && sentences[i][s].text; s++) {
                int people = n;
                Measure measure = shape_measure(sentences[i][s], &people);
                double p = chance[n] * sentences[i][s].eighths / 8.0;
                bits += p * measure.bits;
                tokens += p * measure.bytes;
                after[people] += p;
            }
        }
        memcpy(chance, after, sizeof chance);
    }
    return bits / tokens;
}

// ---------------------------------------------------------------------------------------------------------------------
// The command line

static void stories_write(uint64_t seed, uint64_t bytes) {
    Story story;
    uint64_t written = 0;
    for (uint64_t i = 0; written < bytes; i++) {
        story_tell(&story, &(Dice){.seed = seed, .story = i});
        if (fwrite(story.text, 1, story.length, stdout) != story.length || fputs("\n\n", stdout) == EOF) return;
        written += story.length + 2;
    }
}

int main(int argc, char **argv) {
    int64_t seed = 1337, bytes = INT64_MAX;
    bool entropy = false, help = false;
    Option options[] = {
        {0, "seed", OPTION_COUNT, &seed, 0, 1e15, NULL, "N the same stories on every machine (1337)", false},
        {0, "bytes", OPTION_COUNT, &bytes, 0, 1e15, NULL, "N stop with the story that reaches N bytes (never)",
         false},
        {0, "entropy", OPTION_FLAG, &entropy, 0, 0, NULL, "print the stories' exact entropy in bits per token",
         false},
        {0, "help", OPTION_FLAG, &help, 0, 0, NULL, "print this", false},
    };
    enum { OPTIONS = sizeof options / sizeof *options };
    error_program("stories");
    options_read(options, OPTIONS, argc, argv, false);
    if (help) {
        printf("usage: data/stories [options]    stories on standard output, a blank line after each\n\n");
        options_help(options, OPTIONS);
    } else if (entropy) {
        printf("%.6f\n", story_entropy());
    } else {
        stories_write((uint64_t)seed, (uint64_t)bytes);
    }
    if (ferror(stdout) || fflush(stdout) != 0) {
        die(EXIT_CODE_FAILURE, "is the disk full?", "cannot write to standard output: %s", strerror(errno));
    }
    return EXIT_CODE_DONE;
}
