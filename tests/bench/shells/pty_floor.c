/* The floor under a shell's round trip: bash on a pty, one byte typed back by its prompt, blocking calls, no loop.
 *
 * pty_floor ROUNDS: prints the nanoseconds of each round, one a line; exit code 1 where bash answers anything else.
 */
#include <poll.h>
#include <pty.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static long long now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec * 1000000000LL + at.tv_nsec;
}

/* Reads until nothing has come for half a second after the byte that the prompt is. */
static int settle(int master, char prompt) {
    struct pollfd wanted = {master, POLLIN, 0};
    char buffer[4096];
    int seen = 0;
    for (;;) {
        int ready = poll(&wanted, 1, seen ? 500 : 20000);
        if (ready <= 0) return seen;
        ssize_t got = read(master, buffer, sizeof buffer);
        if (got <= 0) return 0;
        if (memchr(buffer, prompt, (size_t)got)) seen = 1;
    }
}

int main(int count, char **words) {
    int rounds = count > 1 ? atoi(words[1]) : 1000, master;
    char buffer[4096];
    const char *setup = "stty raw -echo; PS2= PROMPT_COMMAND=; PS1=$'\\001'\n";
    if (rounds < 1) return 2;
    long long *spent = calloc((size_t)rounds, sizeof *spent);
    pid_t child = forkpty(&master, NULL, NULL, NULL);
    if (child < 0) return 2;
    if (child == 0) {
        execlp("bash", "bash", "--norc", "--noprofile", "--noediting", "-i", (char *)NULL);
        _exit(127);
    }
    if (write(master, setup, strlen(setup)) < 0 || !settle(master, '\001')) return 1;
    for (int round = 0; round < rounds; round++) {
        long long started = now();
        if (write(master, ":\n", 2) != 2) return 1;
        ssize_t got = read(master, buffer, sizeof buffer);
        spent[round] = now() - started;
        if (got != 1 || buffer[0] != '\001') return 1;
    }
    for (int round = 0; round < rounds; round++) printf("%lld\n", spent[round]);
    close(master);
    return 0;
}
