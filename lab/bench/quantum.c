/* The same work, over and over, and how long each time took: what a training step feels of whatever else runs on its core.
 *
 *   quantum calibrate SECONDS_OF_A_QUANTUM     prints how many rounds that takes here
 *   quantum ROUNDS COUNT                       prints the nanoseconds of each of COUNT quanta, one a line
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static volatile unsigned long long sink;

static long long nanoseconds(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (long long)at.tv_sec * 1000000000LL + at.tv_nsec;
}

static long long work(long rounds) {
    long long began = nanoseconds();
    unsigned long long value = 88172645463325252ULL;
    for (long round = 0; round < rounds; round++) {
        value ^= value << 13;
        value ^= value >> 7;
        value ^= value << 17;
    }
    sink = value;
    return nanoseconds() - began;
}

static int calibrate(double seconds) {
    long rounds = 100000;
    work(rounds * 100);
    long long best = -1;
    for (int attempt = 0; attempt < 50; attempt++) {
        long long took = work(rounds);
        if (best < 0 || took < best) best = took;
    }
    printf("%ld\n", (long)((double)rounds * seconds * 1e9 / (double)best));
    return 0;
}

int main(int count, char **argument) {
    if (count != 3) { fputs("usage: quantum calibrate SECONDS | quantum ROUNDS COUNT\n", stderr); return 2; }
    if (!strcmp(argument[1], "calibrate")) return calibrate(atof(argument[2]));
    long rounds = atol(argument[1]), quanta = atol(argument[2]);
    long long *took = malloc(sizeof *took * (size_t)quanta);
    if (!took) return 1;
    memset(took, 0, sizeof *took * (size_t)quanta); /* its pages are there before anything is measured */
    for (long at = 0; at < quanta; at++) took[at] = work(rounds);
    for (long at = 0; at < quanta; at++) printf("%lld\n", took[at]);
    return 0;
}
