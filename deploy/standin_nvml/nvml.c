/* A stand-in for libnvidia-ml.so.1: the names and the ABI of NVML, and a text file that says what it answers.
 *
 * The file is named by STANDIN_NVML_SCENARIO and read again whenever it changes; standin.py writes it. One word and its
 * values a line; lines before the first `gpu` concern the library and every GPU, lines after it that GPU:
 *
 *   error CALL CODE      this NVML function returns CODE            delay CALL SECONDS   and takes so long
 *   hang CALL            it does not return until this line is gone
 *   gpu                  the next GPU; its NVML index is its place in the file
 *   lost                 every call on it returns NVML_ERROR_GPU_IS_LOST
 *   uuid bus minor name utilization sm_clock memory_clock power temperature memory throttle process
 *
 * Units are NVML's: per cent, MHz, milliwatts, degrees, bytes (used, total), a mask, (pid, bytes).
 * Signatures are those with which pynvml calls; only what the watchdog uses is here.
 */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15 };
enum { MAX_GPUS = 64, MAX_RULES = 64, MAX_PROCESSES = 64 };

typedef struct { char call[80]; char what; double value; } rule_t;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } process_t;
typedef struct { unsigned gpu, memory; } utilization_t;
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct {
    char bus_legacy[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
} pci_t;
typedef struct { unsigned version; int sensor, temperature; } temperature_t;
typedef struct {
    char uuid[96], bus[32], name[96];
    unsigned minor, sm_clock, memory_clock, power, temperature, processes;
    utilization_t utilization;
    unsigned long long used, total, throttle;
    int lost;
    rule_t rules[MAX_RULES];
    int rule_count;
    process_t process[MAX_PROCESSES];
} gpu_t;

static struct { gpu_t gpu[MAX_GPUS]; int count; gpu_t all; int present; } now_, next_;
static struct timespec read_at;
static off_t read_size = -1;
static int initialized;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void take_line(char *line) {
    gpu_t *gpu = next_.count ? &next_.gpu[next_.count - 1] : &next_.all;
    char word[32] = "", rest[256] = "", call[80] = "";
    double value = 0;
    sscanf(line, "%31s %255[^\n]", word, rest);
    if (!strcmp(word, "gpu") && next_.count < MAX_GPUS) next_.count++;
    else if (!strcmp(word, "uuid")) snprintf(gpu->uuid, sizeof gpu->uuid, "%.95s", rest);
    else if (!strcmp(word, "bus")) snprintf(gpu->bus, sizeof gpu->bus, "%.31s", rest);
    else if (!strcmp(word, "name")) snprintf(gpu->name, sizeof gpu->name, "%.95s", rest);
    else if (!strcmp(word, "minor")) gpu->minor = strtoul(rest, NULL, 0);
    else if (!strcmp(word, "utilization")) sscanf(rest, "%u %u", &gpu->utilization.gpu, &gpu->utilization.memory);
    else if (!strcmp(word, "sm_clock")) gpu->sm_clock = strtoul(rest, NULL, 0);
    else if (!strcmp(word, "memory_clock")) gpu->memory_clock = strtoul(rest, NULL, 0);
    else if (!strcmp(word, "power")) gpu->power = strtoul(rest, NULL, 0);
    else if (!strcmp(word, "temperature")) gpu->temperature = strtoul(rest, NULL, 0);
    else if (!strcmp(word, "memory")) sscanf(rest, "%llu %llu", &gpu->used, &gpu->total);
    else if (!strcmp(word, "throttle")) gpu->throttle = strtoull(rest, NULL, 0);
    else if (!strcmp(word, "lost")) gpu->lost = 1;
    else if (!strcmp(word, "process") && gpu->processes < MAX_PROCESSES) {
        process_t *process = &gpu->process[gpu->processes++];
        process->gpu_instance = process->compute_instance = 0xFFFFFFFFu;
        sscanf(rest, "%u %llu", &process->pid, &process->used);
    } else if ((!strcmp(word, "error") || !strcmp(word, "delay") || !strcmp(word, "hang")) && gpu->rule_count < MAX_RULES) {
        sscanf(rest, "%79s %lf", call, &value);
        rule_t *rule = &gpu->rules[gpu->rule_count++];
        strcpy(rule->call, call);
        rule->what = word[0];
        rule->value = value;
    }
}

/* Reads the scenario if it is another one than last time. The caller holds the lock. */
static void refresh(void) {
    const char *path = getenv("STANDIN_NVML_SCENARIO");
    struct stat info;
    if (!path || stat(path, &info)) { now_.present = 0; read_size = -1; return; }
    if (info.st_size == read_size && !memcmp(&info.st_mtim, &read_at, sizeof read_at)) return;
    FILE *file = fopen(path, "re");
    if (!file) return;
    char line[320];
    memset(&next_, 0, sizeof next_);
    while (fgets(line, sizeof line, file)) take_line(line);
    fclose(file);
    next_.present = 1;
    now_ = next_;
    read_size = info.st_size;
    read_at = info.st_mtim;
}

static void pause_for(double seconds) {
    struct timespec left = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    while (nanosleep(&left, &left) && errno == EINTR) {}
}

static rule_t *find(gpu_t *gpu, char what, const char *call) {
    for (int i = 0; gpu && i < gpu->rule_count; i++)
        if (gpu->rules[i].what == what && (!strcmp(gpu->rules[i].call, call) || !strcmp(gpu->rules[i].call, "*")))
            return &gpu->rules[i];
    return NULL;
}

static rule_t *rule_of(gpu_t *gpu, char what, const char *call) {
    rule_t *own = find(gpu, what, call);
    return own ? own : find(&now_.all, what, call);
}

/* What every call begins with: the newest scenario, its delay, its hang, its error. The lock is not held while it waits. */
static int enter(gpu_t *gpu, const char *call) {
    pthread_mutex_lock(&lock);
    refresh();
    rule_t *delay = rule_of(gpu, 'd', call);
    double seconds = delay ? delay->value : 0;
    while (rule_of(gpu, 'h', call) || seconds > 0) {
        pthread_mutex_unlock(&lock);
        pause_for(seconds > 0 ? seconds : 0.05);
        seconds = 0;
        pthread_mutex_lock(&lock);
        refresh();
    }
    rule_t *error = rule_of(gpu, 'e', call);
    int code = error ? (int)error->value : SUCCESS;
    if (!now_.present) code = DRIVER_NOT_LOADED;
    else if (gpu && gpu->lost) code = GPU_IS_LOST;
    else if (!code && !initialized && strncmp(call, "nvmlInit", 8)) code = UNINITIALIZED;
    pthread_mutex_unlock(&lock);
    return code;
}

#define ENTER(gpu) do { int code = enter(gpu, __func__); if (code) return code; } while (0)

int nvmlInitWithFlags(unsigned flags) { (void)flags; ENTER(NULL); initialized++; return SUCCESS; }
int nvmlInit_v2(void) { ENTER(NULL); initialized++; return SUCCESS; }
int nvmlShutdown(void) { ENTER(NULL); initialized--; return SUCCESS; }

const char *nvmlErrorString(int code) {
    static char text[40];
    if (code == GPU_IS_LOST) return "GPU is lost";
    snprintf(text, sizeof text, "error %d", code);
    return text;
}

int nvmlDeviceGetCount_v2(unsigned *count) { ENTER(NULL); *count = now_.count; return SUCCESS; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, gpu_t **gpu) {
    int code = enter(index < MAX_GPUS ? &now_.gpu[index] : NULL, __func__);
    if (code) return code;
    if (index >= (unsigned)now_.count) return INVALID_ARGUMENT;
    *gpu = &now_.gpu[index];
    return SUCCESS;
}

static int copy(char *to, unsigned size, const char *from) {
    if (strlen(from) >= size) return INSUFFICIENT_SIZE;
    strcpy(to, from);
    return SUCCESS;
}

int nvmlDeviceGetUUID(gpu_t *gpu, char *uuid, unsigned size) { ENTER(gpu); return copy(uuid, size, gpu->uuid); }
int nvmlDeviceGetName(gpu_t *gpu, char *name, unsigned size) { ENTER(gpu); return copy(name, size, gpu->name); }
int nvmlDeviceGetMinorNumber(gpu_t *gpu, unsigned *minor) { ENTER(gpu); *minor = gpu->minor; return SUCCESS; }

int nvmlDeviceGetPciInfo_v3(gpu_t *gpu, pci_t *pci) {
    ENTER(gpu);
    memset(pci, 0, sizeof *pci);
    strcpy(pci->bus_id, gpu->bus);
    sscanf(gpu->bus, "%x:%x:%x", &pci->domain, &pci->bus, &pci->device);
    snprintf(pci->bus_legacy, sizeof pci->bus_legacy, "%04X:%02X:%02X.0", pci->domain & 0xFFFF, pci->bus & 0xFF, pci->device & 0xFF);
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(gpu_t *gpu, utilization_t *rates) { ENTER(gpu); *rates = gpu->utilization; return SUCCESS; }

int nvmlDeviceGetClockInfo(gpu_t *gpu, unsigned type, unsigned *mhz) {
    ENTER(gpu);
    if (type != 1 && type != 2) return INVALID_ARGUMENT; /* NVML_CLOCK_SM, NVML_CLOCK_MEM */
    *mhz = type == 1 ? gpu->sm_clock : gpu->memory_clock;
    return SUCCESS;
}

int nvmlDeviceGetPowerUsage(gpu_t *gpu, unsigned *milliwatts) { ENTER(gpu); *milliwatts = gpu->power; return SUCCESS; }

int nvmlDeviceGetTemperature(gpu_t *gpu, unsigned sensor, unsigned *degrees) {
    ENTER(gpu);
    if (sensor) return INVALID_ARGUMENT;
    *degrees = gpu->temperature;
    return SUCCESS;
}

int nvmlDeviceGetTemperatureV(gpu_t *gpu, temperature_t *temperature) {
    ENTER(gpu);
    temperature->temperature = (int)gpu->temperature;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(gpu_t *gpu, memory_t *memory) {
    ENTER(gpu);
    memory->total = gpu->total;
    memory->used = gpu->used;
    memory->free = gpu->total - gpu->used;
    return SUCCESS;
}

int nvmlDeviceGetCurrentClocksEventReasons(gpu_t *gpu, unsigned long long *mask) { ENTER(gpu); *mask = gpu->throttle; return SUCCESS; }
int nvmlDeviceGetCurrentClocksThrottleReasons(gpu_t *gpu, unsigned long long *mask) { ENTER(gpu); *mask = gpu->throttle; return SUCCESS; }

static int list_processes(gpu_t *gpu, unsigned *count, process_t *list) {
    unsigned room = *count;
    *count = gpu->processes;
    if (!gpu->processes) return SUCCESS;
    if (!list || room < gpu->processes) return INSUFFICIENT_SIZE;
    memcpy(list, gpu->process, gpu->processes * sizeof *list);
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(gpu_t *gpu, unsigned *count, process_t *list) { ENTER(gpu); return list_processes(gpu, count, list); }
int nvmlDeviceGetComputeRunningProcesses_v2(gpu_t *gpu, unsigned *count, process_t *list) { ENTER(gpu); return list_processes(gpu, count, list); }
