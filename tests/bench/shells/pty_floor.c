/* The floor under a shell's round trip: bash on a pty, one byte typed back by its prompt, blocking calls, no loop.
 *
 * pty_floor ROUNDS: prints the nanoseconds of each round, one a line; exit code 1 where bash answers anything else.
 * pty_floor ROUNDS SHELLS: the same in so many shells at once, on one epoll: prints the nanoseconds of all together.
 */
#include <poll.h>
#include <pty.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>

static long long now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec * 1000000000LL + at.tv_nsec;
}

/* Reads until nothing has come for so many milliseconds after the byte that the prompt is. */
static int settle(int master, char prompt, int quiet_ms) {
    struct pollfd wanted = {master, POLLIN, 0};
    char buffer[4096];
    int seen = 0;
    for (;;) {
        int ready = poll(&wanted, 1, seen ? quiet_ms : 20000);
        if (ready <= 0) return seen;
        ssize_t got = read(master, buffer, sizeof buffer);
        if (got <= 0) return 0;
        if (memchr(buffer, prompt, (size_t)got)) seen = 1;
    }
}

/* A bash at its prompt; its terminal, or -1. */
static int start(int quiet_ms) {
    const char *setup = "stty raw -echo; PS2= PROMPT_COMMAND=; PS1=$'\\001'\n";
    int master;
    pid_t child = forkpty(&master, NULL, NULL, NULL);
    if (child == 0) {
        execlp("bash", "bash", "--norc", "--noprofile", "--noediting", "-i", (char *)NULL);
        _exit(127);
    }
    if (child < 0 || write(master, setup, strlen(setup)) < 0 || !settle(master, '\001', quiet_ms)) return -1;
    return master;
}

/* Every shell runs its next command as soon as it has answered; the nanoseconds until all have run all, or -1. */
static long long together(int rounds, int shells) {
    int *masters = calloc((size_t)shells, sizeof *masters), *left = calloc((size_t)shells, sizeof *left);
    int waiting = epoll_create1(0), running = shells;
    for (int one = 0; one < shells; one++) {
        struct epoll_event wanted = {EPOLLIN, {.u32 = (unsigned)one}};
        if ((masters[one] = start(20)) < 0 || epoll_ctl(waiting, EPOLL_CTL_ADD, masters[one], &wanted)) return -1;
        left[one] = rounds;
    }
    long long started = now();
    for (int one = 0; one < shells; one++) if (write(masters[one], ":\n", 2) != 2) return -1;
    while (running) {
        struct epoll_event ready[64];
        int count = epoll_wait(waiting, ready, 64, 20000);
        if (count <= 0) return -1;
        for (int at = 0; at < count; at++) {
            char answer[16];
            int one = (int)ready[at].data.u32;
            if (read(masters[one], answer, sizeof answer) != 1 || answer[0] != '\001') return -1;
            if (--left[one] == 0) running--;
            else if (write(masters[one], ":\n", 2) != 2) return -1;
        }
    }
    return now() - started;
}

int main(int count, char **words) {
    int rounds = count > 1 ? atoi(words[1]) : 1000, shells = count > 2 ? atoi(words[2]) : 0;
    char buffer[4096];
    if (rounds < 1) return 2;
    if (shells > 0) {
        long long spent = together(rounds, shells);
        printf("%lld\n", spent);
        return spent < 0;
    }
    long long *spent = calloc((size_t)rounds, sizeof *spent);
    int master = start(500);
    if (master < 0) return 1;
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
