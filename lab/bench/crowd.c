/* What one user may start on a node to be in everybody's way, cheaply: the figures are of who watches, not of who is watched.
 *
 *   crowd sleep COUNT     COUNT children that sleep
 *   crowd threads COUNT   one process with COUNT threads
 *   crowd ranks MS        for ever a new rank that lives MS milliseconds: SLURM_PROCID is another one each time
 *   crowd log BYTES_PER_S lines of training, on standard output
 *   crowd hold            nothing: it is there, with what it has open
 *
 * All end with their parent.
 */
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { BLOCK = 1 << 20 };

static void *sleep_for_ever(void *nothing) {
    for (;;) pause();
    return nothing;
}

static void wait_ms(long ms) {
    struct timespec time = {ms / 1000, ms % 1000 * 1000000};
    nanosleep(&time, NULL);
}

static void be_many(int count) {
    signal(SIGCHLD, SIG_IGN);
    for (int left = count; left > 0; left--) {
        pid_t pid = fork();
        if (pid < 0) { perror("fork"); break; }
        if (pid == 0) { prctl(PR_SET_PDEATHSIG, SIGKILL); sleep_for_ever(NULL); }
    }
    sleep_for_ever(NULL);
}

static void be_threaded(int count) {
    pthread_attr_t small;
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, 64 * 1024);
    for (int left = count - 1; left > 0; left--) {
        pthread_t thread;
        if (pthread_create(&thread, &small, sleep_for_ever, NULL)) { perror("pthread_create"); break; }
    }
    sleep_for_ever(NULL);
}

static void be_short(char *program, long ms) {
    char number[16], life[16];
    snprintf(life, sizeof life, "%ld", ms);
    for (int rank = 0;; rank = (rank + 1) % 100000) {
        snprintf(number, sizeof number, "%d", rank);
        setenv("SLURM_PROCID", number, 1);
        pid_t pid = fork();
        if (pid < 0) { perror("fork"); exit(1); }
        if (pid == 0) { execl(program, "python3", "one", life, (char *)NULL); _exit(127); }
        waitpid(pid, NULL, 0);
    }
}

static void be_loud(double bytes_per_s) {
    static char block[BLOCK + 256];
    for (long step = 1;;) {
        size_t size = 0;
        while (size < BLOCK)
            size += (size_t)snprintf(block + size, sizeof block - size,
                " iteration %8ld/99999999 | elapsed time per iteration (ms): 1.5 | lm loss: 2.100000E+00 | rank says something\n", step++);
        if (write(1, block, size) < 0) { perror("write"); exit(1); }
        wait_ms((long)(1000.0 * (double)size / bytes_per_s));
    }
}

int main(int count, char **argument) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    const char *what = count > 1 ? argument[1] : "";
    double number = count > 2 ? atof(argument[2]) : 0;
    if (!strcmp(what, "sleep")) be_many((int)number);
    if (!strcmp(what, "threads")) be_threaded((int)number);
    if (!strcmp(what, "ranks")) be_short(argument[0], (long)number);
    if (!strcmp(what, "log")) be_loud(number);
    if (!strcmp(what, "hold")) sleep_for_ever(NULL);
    if (!strcmp(what, "one")) { wait_ms((long)number); return 0; }
    fputs("usage: crowd sleep|threads|ranks|log|hold|one [NUMBER]\n", stderr);
    return 2;
}
