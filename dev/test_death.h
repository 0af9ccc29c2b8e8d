// expect_death: how tests check that something ends the program as it should. Include it after cmocka.h.
//
//     static void open_missing(void *path) { loader_open((LoaderOptions){.glob = path, …}); }
//     expect_death(EXIT_CODE_USAGE, "matches no file", open_missing, "x*.bin");
//
// The function runs in a child process whose stderr is a pipe. The test fails unless the child ends with `code` and
// says `substring` on the way. As in a shell, 128 + signal stands for a signal: 134 for a failed assert.
#ifndef DEV_TEST_DEATH_H
#define DEV_TEST_DEATH_H

#include "error.h"
#include <stdio.h>    // fflush
#include <string.h>   // strstr
#include <sys/wait.h> // waitpid
#include <unistd.h>   // fork, pipe, dup2, read, _exit

static void expect_death(int code, const char *substring, void (*function)(void *), void *argument) {
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    fflush(NULL); // or the child would say it again
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        close(ends[0]);
        dup2(ends[1], STDERR_FILENO);
        error_ender(_exit); // no exit handlers: those are the parent's, leak checkers included
        function(argument);
        _exit(EXIT_CODE_DONE);
    }
    close(ends[1]);
    char message[8192];
    size_t length = 0;
    ssize_t got;
    while ((got = read(ends[0], message + length, sizeof message - 1 - length)) > 0) length += (size_t)got;
    message[length] = '\0';
    close(ends[0]);
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    int ended = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    if (ended != code || !strstr(message, substring))
        fail_msg("expected exit code %d and '%s', found exit code %d and '%s'", code, substring, ended, message);
}

#endif
