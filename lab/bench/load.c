/* One process of a training job as it looks from outside: threads that sleep where a trainer's do, open descriptors, a log.
 *
 *   load KIND RANK THREADS DESCRIPTORS PERIOD_S
 *   load idle COUNT
 *
 * `idle` is the rest of the machine: COUNT processes that sleep, below one that buries whatever loses its parent.
 * KIND `rank` writes a line of training to standard output every PERIOD_S seconds; `batch` is the job's batch script, which
 * writes a line of rank 0 to standard output and now and then one to standard error. All else sleeps: three of five threads
 * on a futex (NCCL's and the loader's queues), the others in poll (NCCL's proxies and sockets), of which one wakes up once
 * a second. It ends with its parent.
 */
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t never = PTHREAD_COND_INITIALIZER;

static void *wait_on_futex(void *name) {
    prctl(PR_SET_NAME, name);
    pthread_mutex_lock(&lock);
    for (;;) pthread_cond_wait(&never, &lock);
    return NULL;
}

static void *wait_in_poll(void *name) {
    struct pollfd fd = {eventfd(0, EFD_CLOEXEC), POLLIN, 0};
    prctl(PR_SET_NAME, name);
    for (;;) poll(&fd, 1, -1);
    return NULL;
}

static void *wake_now_and_then(void *name) {
    prctl(PR_SET_NAME, name);
    for (;;) poll(NULL, 0, 1000);
    return NULL;
}

static void start(void *(*run)(void *), char *name) {
    pthread_attr_t small;
    pthread_t thread;
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, 64 * 1024);
    if (pthread_create(&thread, &small, run, name)) { perror("pthread_create"); exit(1); }
}

static void open_descriptors(int count) {
    for (int left = count; left > 0; left -= 4) {
        int pair[2];
        if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair)) break;
        eventfd(0, 0);
        open("/dev/null", O_RDWR);
    }
}

static void write_line(int rank, long step, double period) {
    static char text[1024];
    double loss = 2.1 + 4.0 / (1.0 + (double)step / 100.0);
    int size = snprintf(text, sizeof text,
        " [2026-11-21 08:%02ld:%02ld] iteration %8ld/  500000 | consumed samples: %12ld | elapsed time per iteration (ms): %.1f | "
        "throughput per GPU (TFLOP/s/GPU): %.1f | learning rate: 1.499E-04 | global batch size:  1024 | lm loss: %.6E | "
        "loss scale: 1.0 | grad norm: 0.%03ld | number of skipped iterations:   0 | number of nan iterations:   0 |\n",
        step / 60 % 60, step % 60, step, step * 1024, period * 1000 + rank, 401.5, loss, 200 + step % 100);
    if (write(1, text, (size_t)size) < 0) exit(1);
    if (step % 20 == 0) {
        size = snprintf(text, sizeof text, "[rank%d]: UserWarning: The given buffer is not writable, and PyTorch does not support it.\n", rank);
        if (write(2, text, (size_t)size) < 0) exit(1);
    }
}

static void be_idle(int count) {
    signal(SIGCHLD, SIG_IGN);
    for (int left = count; left > 0; left--)
        if (fork() == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            prctl(PR_SET_NAME, "idle-daemon");
            for (;;) pause();
        }
    for (;;) pause();
}

int main(int count, char **argument) {
    if (count == 3 && !strcmp(argument[1], "idle")) be_idle(atoi(argument[2]));
    if (count != 6) { fputs("usage: load KIND RANK THREADS DESCRIPTORS PERIOD_S | load idle COUNT\n", stderr); return 2; }
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    int rank = atoi(argument[2]), threads = atoi(argument[3]);
    double period = atof(argument[5]);
    open_descriptors(atoi(argument[4]));
    for (int left = threads - 1; left > 0; left--) {
        if (left == 1) start(wake_now_and_then, "pt_nccl_watchdg");
        else if (left % 5 < 2) start(wait_in_poll, "NCCL Service");
        else start(wait_on_futex, "pt_data_pin");
    }
    struct timespec pause = {(time_t)period, (long)((period - (double)(time_t)period) * 1e9)};
    for (long step = 1;; step++) {
        nanosleep(&pause, NULL);
        write_line(rank, step, period);
    }
}
