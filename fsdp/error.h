// error: the one way in which this program gives up.
//
// Every failure is one line on stderr that says what happened, where, and what to do about it:
//
//     train_gpt [rank 1]: data/x_train_000003.bin is 1023 bytes, expected at least 1024. HINT: ...
//
// and then every rank ends. How the other ranks are ended is comm's business: it installs a hook (error_ender).
// Input from outside is checked with die(); invariants of our own code with assert().
#ifndef FSDP_ERROR_H
#define FSDP_ERROR_H

#ifdef __cplusplus
extern "C" {
#endif

// The exit codes that scripts may rely on.
enum {
    EXIT_CODE_DONE = 0,      // finished
    EXIT_CODE_FAILURE = 1,   // something went wrong; the message says what
    EXIT_CODE_USAGE = 2,     // wrong options or unusable input
    EXIT_CODE_NONFINITE = 3, // the loss or the gradient norm was not a finite number
    EXIT_CODE_STOPPED = 75,  // stopped on request, state saved (EX_TEMPFAIL: run again to go on)
};

// Names the program in messages ("train_gpt"); kept by pointer.
void error_program(const char *name);

// Tags messages with this rank when there is more than one.
void error_rank(int rank, int ranks);

// Installs the function that ends every rank with `code` and does not return; NULL means exit(code) alone.
void error_ender(void (*end)(int code));

// Ends every rank after printing one line, formatted like printf, then " HINT: hint" when hint is not NULL. Higher ranks hold
// back a little, so that what all of them meet is said once.
#ifdef __GNUC__
__attribute__((noreturn, format(printf, 3, 4)))
#endif
void die(int code, const char *hint, const char *format, ...);

// Like die, but goes on: for what the user should know and can live with.
#ifdef __GNUC__
__attribute__((format(printf, 2, 3)))
#endif
void warn(const char *hint, const char *format, ...);

#ifdef __cplusplus
}
#endif
#endif
