/* A stand-in for libnvidia-ml.so.1: the names and the ABI of NVML, and a text file that says what it answers.
 *
 * The file is named by STANDIN_NVML_SCENARIO and read again whenever it changes; standin.py writes it. One word and its
 * values a line; lines before the first `gpu` concern the library and every GPU, lines after it that GPU:
 *
 *   error CALL CODE      this NVML function returns CODE; CALL may be *, of several lines the first counts
 *   delay CALL SECONDS   and takes so long: busy below 50 us, as the driver would be, asleep above
 *   hang CALL            it does not return until this line is gone
 *   snapshot             which GPUs there are is asked in nvmlInit only, not in every call
 *   gpu                  the next GPU; its NVML index is its place in the file
 *   lost                 every call on it returns NVML_ERROR_GPU_IS_LOST
 *   uuid bus minor name utilization sm_clock memory_clock power temperature memory throttle
 *   process PID BYTES, graphics PID BYTES           in the list of compute and of graphics processes; -1: bytes not known
 *   event SEQUENCE XID [TYPE]                       told once to every event set made while SEQUENCE was not there yet
 *   event_types MASK                                what can be registered; 0: nothing
 * Without these lines the calls return NVML_ERROR_NOT_SUPPORTED:
 *   ecc CORRECTED UNCORRECTED        remapped CORRECTED UNCORRECTED PENDING FAILED      retired SINGLE DOUBLE PENDING
 *   pcie WIDTH MAX GENERATION MAX    replays N         link ACTIVE REPLAY RECOVERY CRC  (a line for each NVLink, from 0)
 *   link_counters totals|links|calls|none           how their errors can be asked: drivers and generations differ
 *   gpm SM TENSOR DRAM NVLINK_RX NVLINK_TX PCIE_RX PCIE_TX      per cent, and MiB a second
 *   mig 0|1, instance GPU_INSTANCE COMPUTE_INSTANCE UUID USED TOTAL
 *
 * Units are NVML's: per cent, MHz, milliwatts, degrees, bytes (used, total), a mask. A handle stays with its GPU, by UUID,
 * wherever that stands in the file. Signatures are those with which pynvml calls; only what the watchdog uses is here.
 */
#include <errno.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

enum {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9, TIMEOUT = 10, GPU_IS_LOST = 15, NO_MEMORY = 20
};
enum { MAX_GPUS = 32, MAX_RULES = 48, MAX_PROCESSES = 256, MAX_LINKS = 36, MAX_INSTANCES = 8, MAX_EVENTS = 128 };
enum { MAX_SETS = 8, MAX_HANDLES = 512 };
enum { HAS_ECC = 1, HAS_REMAPPED = 2, HAS_RETIRED = 4, HAS_PCIE = 8, HAS_REPLAYS = 16, HAS_MIG = 32, HAS_GPM = 64 };
enum { GPM_VALUES = 7 };
static const double BUSY_BELOW_S = 50e-6, WAKE_EARLY_S = 150e-6; /* timers are late by about so much */

typedef unsigned long long u64;
typedef struct { char call[64]; char what; double value; } rule_t;
typedef struct { unsigned pid; u64 used; unsigned gpu_instance, compute_instance; } process_t;
typedef struct { unsigned gpu, memory; } utilization_t;
typedef struct { u64 total, free, used; } memory_t;
typedef struct {
    char bus_legacy[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
} pci_t;
typedef struct { unsigned version; int sensor, temperature; } temperature_t;
typedef struct {
    unsigned field, scope;
    long long timestamp, latency_us;
    unsigned type, code;
    union { u64 whole; unsigned small; } value;
} field_t;
typedef struct { int active; u64 replay, recovery, crc; } link_t;
typedef struct { unsigned gpu_instance, compute_instance; char uuid[96]; u64 used, total; } instance_t;
typedef struct { u64 sequence, data, type; } happening_t;
typedef struct {
    char uuid[96], bus[32], name[96];
    unsigned minor, sm_clock, memory_clock, power, temperature, has;
    utilization_t utilization;
    u64 used, total, throttle, event_types;
    u64 ecc[2];
    unsigned remapped[4], retired[3], pcie[4], replays, mig;
    double gpm[GPM_VALUES];
    char link_counters;
    int lost, rule_count, link_count, instance_count, event_count;
    unsigned list_count[2];
    rule_t rules[MAX_RULES];
    link_t link[MAX_LINKS];
    instance_t instance[MAX_INSTANCES];
    happening_t event[MAX_EVENTS];
    process_t list[2][MAX_PROCESSES];
} gpu_t;
/* What pynvml holds on to. A MIG device has a parent: calls on it fail as calls on that would. */
typedef struct { char uuid[96], parent[96]; } handle_t;
typedef struct { handle_t *device; u64 type, data; unsigned gpu_instance, compute_instance; } event_t;
typedef struct { int used, count; u64 seen; handle_t *gpu[MAX_GPUS]; u64 types[MAX_GPUS]; } set_t;

typedef struct { gpu_t all, gpu[MAX_GPUS]; int count, present, snapshot; } scenario_t;
static scenario_t now_, next_;
static struct timespec read_at;
static off_t read_size = -1;
static ino_t read_inode;
static int initialized, snapshot_count;
static char snapshot[MAX_GPUS][96];
static handle_t handles[MAX_HANDLES];
static set_t sets[MAX_SETS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* ------------------------------------------------------------------------------------------- the scenario */

static void take_rule(gpu_t *gpu, const char *word, const char *rest) {
    if (gpu->rule_count == MAX_RULES) return;
    rule_t *rule = &gpu->rules[gpu->rule_count++];
    rule->call[0] = 0;
    rule->value = 0;
    rule->what = word[0];
    sscanf(rest, "%63s %lf", rule->call, &rule->value);
}

static void take_process(gpu_t *gpu, int list, const char *rest) {
    if (gpu->list_count[list] == MAX_PROCESSES) return;
    process_t *process = &gpu->list[list][gpu->list_count[list]++];
    long long used = 0;
    process->gpu_instance = process->compute_instance = 0xFFFFFFFFu;
    sscanf(rest, "%u %lld", &process->pid, &used);
    process->used = (u64)used; /* -1 is NVML_VALUE_NOT_AVAILABLE */
}

static int take_value(gpu_t *gpu, const char *word, const char *rest) {
    if (!strcmp(word, "uuid")) snprintf(gpu->uuid, sizeof gpu->uuid, "%.95s", rest);
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
    else if (!strcmp(word, "event_types")) gpu->event_types = strtoull(rest, NULL, 0);
    else if (!strcmp(word, "link_counters")) gpu->link_counters = rest[0];
    else if (!strcmp(word, "lost")) gpu->lost = 1;
    else return 0;
    return 1;
}

static void take_health(gpu_t *gpu, const char *word, const char *rest) {
    if (!strcmp(word, "ecc")) {
        gpu->has |= HAS_ECC;
        sscanf(rest, "%llu %llu", &gpu->ecc[0], &gpu->ecc[1]);
    } else if (!strcmp(word, "remapped")) {
        gpu->has |= HAS_REMAPPED;
        sscanf(rest, "%u %u %u %u", &gpu->remapped[0], &gpu->remapped[1], &gpu->remapped[2], &gpu->remapped[3]);
    } else if (!strcmp(word, "retired")) {
        gpu->has |= HAS_RETIRED;
        sscanf(rest, "%u %u %u", &gpu->retired[0], &gpu->retired[1], &gpu->retired[2]);
    } else if (!strcmp(word, "pcie")) {
        gpu->has |= HAS_PCIE;
        sscanf(rest, "%u %u %u %u", &gpu->pcie[0], &gpu->pcie[1], &gpu->pcie[2], &gpu->pcie[3]);
    } else if (!strcmp(word, "replays")) {
        gpu->has |= HAS_REPLAYS;
        gpu->replays = strtoul(rest, NULL, 0);
    } else if (!strcmp(word, "link") && gpu->link_count < MAX_LINKS) {
        link_t *link = &gpu->link[gpu->link_count++];
        memset(link, 0, sizeof *link);
        sscanf(rest, "%d %llu %llu %llu", &link->active, &link->replay, &link->recovery, &link->crc);
    } else if (!strcmp(word, "gpm")) {
        double *it = gpu->gpm;
        gpu->has |= HAS_GPM;
        sscanf(rest, "%lf %lf %lf %lf %lf %lf %lf", it, it + 1, it + 2, it + 3, it + 4, it + 5, it + 6);
    } else if (!strcmp(word, "mig")) {
        gpu->has |= HAS_MIG;
        gpu->mig = strtoul(rest, NULL, 0);
    } else if (!strcmp(word, "instance") && gpu->instance_count < MAX_INSTANCES) {
        instance_t *it = &gpu->instance[gpu->instance_count++];
        memset(it, 0, sizeof *it);
        sscanf(rest, "%u %u %95s %llu %llu", &it->gpu_instance, &it->compute_instance, it->uuid, &it->used, &it->total);
    } else if (!strcmp(word, "event") && gpu->event_count < MAX_EVENTS) {
        happening_t *event = &gpu->event[gpu->event_count++];
        event->type = 8; /* nvmlEventTypeXidCriticalError */
        event->sequence = event->data = 0;
        sscanf(rest, "%llu %llu %llu", &event->sequence, &event->data, &event->type);
    }
}

/* Clears what counts; the arrays behind the counts are filled as they grow, and pages that nobody needs stay untouched. */
static void clear(gpu_t *gpu) {
    memset(gpu, 0, offsetof(gpu_t, rules));
    gpu->event_types = 0x1F;
    gpu->link_counters = 't';
}

static void take_line(char *line) {
    gpu_t *gpu = next_.count ? &next_.gpu[next_.count - 1] : &next_.all;
    char word[32] = "", rest[256] = "";
    if (sscanf(line, "%31s %255[^\n]", word, rest) < 1) return;
    if (!strcmp(word, "gpu")) {
        if (next_.count < MAX_GPUS) clear(&next_.gpu[next_.count++]);
    } else if (!strcmp(word, "snapshot")) next_.snapshot = 1;
    else if (!strcmp(word, "process")) take_process(gpu, 0, rest);
    else if (!strcmp(word, "graphics")) take_process(gpu, 1, rest);
    else if (!strcmp(word, "error") || !strcmp(word, "delay") || !strcmp(word, "hang")) take_rule(gpu, word, rest);
    else if (!take_value(gpu, word, rest)) take_health(gpu, word, rest);
}

/* Reads the scenario if it is another one than last time. The caller holds the lock. */
static void refresh(void) {
    const char *path = getenv("STANDIN_NVML_SCENARIO");
    struct stat info;
    if (!path || stat(path, &info)) { now_.present = 0; read_size = -1; return; }
    if (info.st_size == read_size && info.st_ino == read_inode && !memcmp(&info.st_mtim, &read_at, sizeof read_at)) return;
    FILE *file = fopen(path, "re");
    if (!file) return;
    char line[320];
    clear(&next_.all);
    next_.count = next_.snapshot = 0;
    while (fgets(line, sizeof line, file)) take_line(line);
    fclose(file);
    now_.all = next_.all;
    for (int i = 0; i < next_.count; i++) now_.gpu[i] = next_.gpu[i];
    now_.count = next_.count;
    now_.snapshot = next_.snapshot;
    now_.present = 1;
    read_size = info.st_size;
    read_at = info.st_mtim;
    read_inode = info.st_ino;
}

/* ------------------------------------------------------------------------------------------- every call */

static gpu_t *gpu_of(const char *uuid) {
    for (int i = 0; i < now_.count; i++)
        if (!strcmp(now_.gpu[i].uuid, uuid)) return &now_.gpu[i];
    return NULL;
}

static gpu_t *owner_of(const handle_t *handle) { return gpu_of(handle->parent[0] ? handle->parent : handle->uuid); }

static instance_t *instance_of(gpu_t *gpu, const handle_t *handle) {
    for (int i = 0; i < gpu->instance_count; i++)
        if (!strcmp(gpu->instance[i].uuid, handle->uuid)) return &gpu->instance[i];
    return NULL;
}

static handle_t *handle_of(const char *uuid, const char *parent) {
    for (int i = 0; i < MAX_HANDLES; i++) {
        handle_t *handle = &handles[i];
        if (!handle->uuid[0]) {
            strcpy(handle->uuid, uuid);
            strcpy(handle->parent, parent);
        }
        if (!strcmp(handle->uuid, uuid)) return handle;
    }
    return NULL;
}

static double seconds_now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec + (double)at.tv_nsec * 1e-9;
}

static void pause_for(double seconds) {
    struct timespec left = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    while (nanosleep(&left, &left) && errno == EINTR) {}
}

static const rule_t *find(const gpu_t *gpu, char what, const char *call) {
    for (int i = 0; gpu && i < gpu->rule_count; i++)
        if (gpu->rules[i].what == what && (!strcmp(gpu->rules[i].call, call) || !strcmp(gpu->rules[i].call, "*")))
            return &gpu->rules[i];
    return NULL;
}

static const rule_t *rule_of(const gpu_t *gpu, char what, const char *call) {
    const rule_t *own = find(gpu, what, call);
    return own ? own : find(&now_.all, what, call);
}

/* Whom a call is about: a handle, or a place in the list, or (NULL, -1) the library. NULL: nobody, or not there any more. */
static gpu_t *whom(const handle_t *handle, int index) {
    if (handle) return owner_of(handle);
    if (index < 0) return NULL;
    if (now_.snapshot) return index < snapshot_count ? gpu_of(snapshot[index]) : NULL;
    return index < now_.count ? &now_.gpu[index] : NULL;
}

/* What every call begins with: the newest scenario, its delay, its hang, its error. The lock is not held while it waits. */
static int enter(const handle_t *handle, int index, const char *call, gpu_t **found) {
    double began = seconds_now();
    pthread_mutex_lock(&lock);
    refresh();
    gpu_t *gpu = whom(handle, index);
    const rule_t *delay = rule_of(gpu, 'd', call);
    double seconds = delay ? delay->value : 0;
    while (seconds > 0 || rule_of(gpu, 'h', call)) {
        pthread_mutex_unlock(&lock);
        if (seconds <= 0) pause_for(0.05);
        else if (seconds >= BUSY_BELOW_S) pause_for(seconds - WAKE_EARLY_S);
        while (seconds_now() - began < seconds) {}
        int short_one = seconds > 0 && seconds < BUSY_BELOW_S;
        seconds = 0;
        pthread_mutex_lock(&lock);
        if (!short_one) refresh();
        gpu = whom(handle, index);
    }
    const rule_t *error = rule_of(gpu, 'e', call);
    int code = error ? (int)error->value : SUCCESS;
    int count = now_.snapshot ? snapshot_count : now_.count;
    if (!now_.present) code = DRIVER_NOT_LOADED;
    else if (!handle && index >= count) code = INVALID_ARGUMENT;
    else if ((handle || index >= 0) && (!gpu || gpu->lost)) code = GPU_IS_LOST;
    else if (!code && !initialized && strncmp(call, "nvmlInit", 8)) code = UNINITIALIZED;
    pthread_mutex_unlock(&lock);
    *found = gpu;
    return code;
}

#define LIBRARY gpu_t *gpu; do { int code_ = enter(NULL, -1, __func__, &gpu); if (code_) return code_; } while (0)
#define DEVICE gpu_t *gpu; do { \
        if (!handle) return INVALID_ARGUMENT; \
        int code_ = enter(handle, -1, __func__, &gpu); \
        if (code_) return code_; \
    } while (0)
#define NEEDS(what) do { if (!(gpu->has & (what))) return NOT_SUPPORTED; } while (0)

/* ------------------------------------------------------------------------------------------- the library */

static int begin(void) {
    if (!initialized++)
        for (snapshot_count = 0; snapshot_count < now_.count; snapshot_count++)
            strcpy(snapshot[snapshot_count], now_.gpu[snapshot_count].uuid);
    return SUCCESS;
}

int nvmlInitWithFlags(unsigned flags) { (void)flags; LIBRARY; return begin(); }
int nvmlInit_v2(void) { LIBRARY; return begin(); }

int nvmlShutdown(void) {
    LIBRARY;
    if (!--initialized) memset(sets, 0, sizeof sets);
    return SUCCESS;
}

const char *nvmlErrorString(int code) {
    static char text[40];
    if (code == GPU_IS_LOST) return "GPU is lost";
    snprintf(text, sizeof text, "error %d", code);
    return text;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    LIBRARY;
    *count = now_.snapshot ? snapshot_count : now_.count;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, handle_t **handle) {
    gpu_t *gpu;
    int code = enter(NULL, index < MAX_GPUS ? (int)index : MAX_GPUS, __func__, &gpu);
    if (code) return code;
    *handle = handle_of(gpu->uuid, "");
    return *handle ? SUCCESS : NO_MEMORY;
}

/* ------------------------------------------------------------------------------------------- who it is */

static int copy(char *to, unsigned size, const char *from) {
    if (strlen(from) >= size) return INSUFFICIENT_SIZE;
    strcpy(to, from);
    return SUCCESS;
}

int nvmlDeviceGetUUID(handle_t *handle, char *uuid, unsigned size) { DEVICE; return copy(uuid, size, handle->uuid); }
int nvmlDeviceGetName(handle_t *handle, char *name, unsigned size) { DEVICE; return copy(name, size, gpu->name); }
int nvmlDeviceGetMinorNumber(handle_t *handle, unsigned *minor) { DEVICE; *minor = gpu->minor; return SUCCESS; }

int nvmlDeviceGetPciInfo_v3(handle_t *handle, pci_t *pci) {
    DEVICE;
    memset(pci, 0, sizeof *pci);
    strcpy(pci->bus_id, gpu->bus);
    sscanf(gpu->bus, "%x:%x:%x", &pci->domain, &pci->bus, &pci->device);
    snprintf(pci->bus_legacy, sizeof pci->bus_legacy, "%04X:%02X:%02X.0", pci->domain & 0xFFFF, pci->bus & 0xFF, pci->device & 0xFF);
    return SUCCESS;
}

/* ------------------------------------------------------------------------------------------- what it does */

int nvmlDeviceGetUtilizationRates(handle_t *handle, utilization_t *rates) {
    DEVICE;
    if (gpu->mig) return NOT_SUPPORTED;
    *rates = gpu->utilization;
    return SUCCESS;
}

int nvmlDeviceGetClockInfo(handle_t *handle, unsigned type, unsigned *mhz) {
    DEVICE;
    if (type != 1 && type != 2) return INVALID_ARGUMENT; /* NVML_CLOCK_SM, NVML_CLOCK_MEM */
    *mhz = type == 1 ? gpu->sm_clock : gpu->memory_clock;
    return SUCCESS;
}

int nvmlDeviceGetPowerUsage(handle_t *handle, unsigned *milliwatts) { DEVICE; *milliwatts = gpu->power; return SUCCESS; }

int nvmlDeviceGetTemperature(handle_t *handle, unsigned sensor, unsigned *degrees) {
    DEVICE;
    if (sensor) return INVALID_ARGUMENT;
    *degrees = gpu->temperature;
    return SUCCESS;
}

int nvmlDeviceGetTemperatureV(handle_t *handle, temperature_t *temperature) {
    DEVICE;
    temperature->temperature = (int)gpu->temperature;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(handle_t *handle, memory_t *memory) {
    DEVICE;
    instance_t *instance = handle->parent[0] ? instance_of(gpu, handle) : NULL;
    if (handle->parent[0] && !instance) return NOT_FOUND;
    memory->total = instance ? instance->total : gpu->total;
    memory->used = instance ? instance->used : gpu->used;
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

int nvmlDeviceGetCurrentClocksEventReasons(handle_t *handle, u64 *mask) { DEVICE; *mask = gpu->throttle; return SUCCESS; }
int nvmlDeviceGetCurrentClocksThrottleReasons(handle_t *handle, u64 *mask) { DEVICE; *mask = gpu->throttle; return SUCCESS; }

static int list_processes(gpu_t *gpu, int which, unsigned *count, process_t *list) {
    unsigned room = *count, there = gpu->list_count[which];
    *count = there;
    if (!there) return SUCCESS;
    if (!list || room < there) return INSUFFICIENT_SIZE;
    memcpy(list, gpu->list[which], there * sizeof *list);
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(handle_t *handle, unsigned *count, process_t *list) { DEVICE; return list_processes(gpu, 0, count, list); }
int nvmlDeviceGetComputeRunningProcesses_v2(handle_t *handle, unsigned *count, process_t *list) { DEVICE; return list_processes(gpu, 0, count, list); }
int nvmlDeviceGetGraphicsRunningProcesses_v3(handle_t *handle, unsigned *count, process_t *list) { DEVICE; return list_processes(gpu, 1, count, list); }
int nvmlDeviceGetGraphicsRunningProcesses_v2(handle_t *handle, unsigned *count, process_t *list) { DEVICE; return list_processes(gpu, 1, count, list); }

/* ------------------------------------------------------------------------------------------- how it fares */

int nvmlDeviceGetTotalEccErrors(handle_t *handle, unsigned type, unsigned counter, u64 *count) {
    DEVICE;
    NEEDS(HAS_ECC);
    if (type > 1 || counter) return INVALID_ARGUMENT; /* corrected, uncorrected; volatile */
    *count = gpu->ecc[type];
    return SUCCESS;
}

int nvmlDeviceGetRemappedRows(handle_t *handle, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
    DEVICE;
    NEEDS(HAS_REMAPPED);
    *corrected = gpu->remapped[0];
    *uncorrected = gpu->remapped[1];
    *pending = gpu->remapped[2];
    *failed = gpu->remapped[3];
    return SUCCESS;
}

int nvmlDeviceGetRetiredPages(handle_t *handle, unsigned cause, unsigned *count, u64 *addresses) {
    DEVICE;
    NEEDS(HAS_RETIRED);
    if (cause > 1) return INVALID_ARGUMENT;
    unsigned room = *count;
    *count = gpu->retired[cause];
    if (room < *count || (*count && !addresses)) return INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < *count; i++) addresses[i] = 0x10000ull * (i + 1);
    return SUCCESS;
}

int nvmlDeviceGetRetiredPagesPendingStatus(handle_t *handle, unsigned *pending) {
    DEVICE;
    NEEDS(HAS_RETIRED);
    *pending = gpu->retired[2];
    return SUCCESS;
}

int nvmlDeviceGetCurrPcieLinkWidth(handle_t *handle, unsigned *lanes) { DEVICE; NEEDS(HAS_PCIE); *lanes = gpu->pcie[0]; return SUCCESS; }
int nvmlDeviceGetMaxPcieLinkWidth(handle_t *handle, unsigned *lanes) { DEVICE; NEEDS(HAS_PCIE); *lanes = gpu->pcie[1]; return SUCCESS; }
int nvmlDeviceGetCurrPcieLinkGeneration(handle_t *handle, unsigned *it) { DEVICE; NEEDS(HAS_PCIE); *it = gpu->pcie[2]; return SUCCESS; }
int nvmlDeviceGetMaxPcieLinkGeneration(handle_t *handle, unsigned *it) { DEVICE; NEEDS(HAS_PCIE); *it = gpu->pcie[3]; return SUCCESS; }
int nvmlDeviceGetPcieReplayCounter(handle_t *handle, unsigned *count) { DEVICE; NEEDS(HAS_REPLAYS); *count = gpu->replays; return SUCCESS; }

int nvmlDeviceGetNvLinkState(handle_t *handle, unsigned link, unsigned *active) {
    DEVICE;
    if (!gpu->link_count) return NOT_SUPPORTED;
    if (link >= (unsigned)gpu->link_count) return INVALID_ARGUMENT;
    *active = gpu->link[link].active == 1;
    return SUCCESS;
}

int nvmlDeviceGetNvLinkErrorCounter(handle_t *handle, unsigned link, unsigned counter, u64 *count) {
    DEVICE;
    if (!gpu->link_count || gpu->link_counters == 'n') return NOT_SUPPORTED;
    if (link >= (unsigned)gpu->link_count || counter > 3) return INVALID_ARGUMENT;
    const link_t *it = &gpu->link[link];
    *count = counter == 0 ? it->replay : counter == 1 ? it->recovery : counter == 2 ? it->crc : 0; /* 3: CRC of data */
    return SUCCESS;
}

static unsigned read_field(const gpu_t *gpu, field_t *field) {
    const link_t *link = field->scope < (unsigned)gpu->link_count ? &gpu->link[field->scope] : NULL;
    int totals = gpu->link_counters == 't', each = gpu->link_counters == 'l';
    unsigned id = field->field;
    field->type = 3; /* unsigned long long */
    field->value.whole = 0;
    if (id == 91) { /* NVML_FI_DEV_NVLINK_LINK_COUNT */
        field->type = 1; /* unsigned int */
        field->value.small = (unsigned)gpu->link_count;
        return SUCCESS;
    }
    if (!gpu->link_count) return NOT_SUPPORTED;
    if (totals && (id == 38 || id == 45 || id == 52 || id == 59)) { /* CRC of flits, of data, replay, recovery: all links */
        for (int i = 0; i < gpu->link_count; i++)
            field->value.whole += id == 38 ? gpu->link[i].crc : id == 52 ? gpu->link[i].replay : id == 59 ? gpu->link[i].recovery : 0;
        return SUCCESS;
    }
    if (each && id >= 161 && id <= 163) { /* NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY, _RECOVERY, _CRC of the link in scope */
        if (!link) return INVALID_ARGUMENT;
        field->value.whole = id == 161 ? link->replay : id == 162 ? link->recovery : link->crc;
        return SUCCESS;
    }
    return NOT_SUPPORTED;
}

int nvmlDeviceGetFieldValues(handle_t *handle, int count, field_t *fields) {
    DEVICE;
    for (int i = 0; i < count; i++) fields[i].code = read_field(gpu, &fields[i]);
    return SUCCESS;
}

/* ------------------------------------------------------------------------------------------- MIG */

int nvmlDeviceGetMigMode(handle_t *handle, unsigned *current, unsigned *pending) {
    DEVICE;
    NEEDS(HAS_MIG);
    *current = *pending = gpu->mig;
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(handle_t *handle, unsigned *count) {
    DEVICE;
    *count = gpu->has & HAS_MIG ? MAX_INSTANCES - 1 : 0;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(handle_t *handle, unsigned index, handle_t **instance) {
    DEVICE;
    if (!gpu->mig || index >= MAX_INSTANCES) return gpu->mig ? INVALID_ARGUMENT : NOT_SUPPORTED;
    if (index >= (unsigned)gpu->instance_count) return NOT_FOUND;
    *instance = handle_of(gpu->instance[index].uuid, gpu->uuid);
    return *instance ? SUCCESS : NO_MEMORY;
}

int nvmlDeviceGetGpuInstanceId(handle_t *handle, unsigned *id) {
    DEVICE;
    instance_t *instance = instance_of(gpu, handle);
    if (!instance) return NOT_FOUND;
    *id = instance->gpu_instance;
    return SUCCESS;
}

int nvmlDeviceGetComputeInstanceId(handle_t *handle, unsigned *id) {
    DEVICE;
    instance_t *instance = instance_of(gpu, handle);
    if (!instance) return NOT_FOUND;
    *id = instance->compute_instance;
    return SUCCESS;
}

/* ------------------------------------------------------------------------------------------- GPM */

typedef struct { handle_t *device; double value[GPM_VALUES]; } sample_t;
typedef struct { unsigned metric; int code; double value; const char *names[3]; } metric_t;
typedef struct { unsigned version, isSupportedDevice; } support_t;
typedef struct { unsigned version, count; sample_t *first, *second; metric_t metric[]; } metrics_t;
static const unsigned gpm_ids[GPM_VALUES] = {2, 5, 10, 60, 61, 21, 20}; /* nvmlGpmMetricId_t, in the order of `gpm` */

int nvmlGpmQueryDeviceSupport(handle_t *handle, support_t *support) {
    DEVICE;
    if (support->version != 1) return INVALID_ARGUMENT;
    support->isSupportedDevice = !!(gpu->has & HAS_GPM);
    return SUCCESS;
}

int nvmlGpmSampleAlloc(sample_t **sample) {
    LIBRARY;
    *sample = calloc(1, sizeof **sample);
    return *sample ? SUCCESS : NO_MEMORY;
}

int nvmlGpmSampleGet(handle_t *handle, sample_t *sample) {
    DEVICE;
    NEEDS(HAS_GPM);
    sample->device = handle;
    memcpy(sample->value, gpu->gpm, sizeof gpu->gpm);
    return SUCCESS;
}

/* Between two samples everything was as it is in the second one. */
int nvmlGpmMetricsGet(metrics_t *asked) {
    const sample_t *first = asked->first, *second = asked->second;
    if (asked->version != 1 || !first || !second || first == second || first->device != second->device) return INVALID_ARGUMENT;
    handle_t *handle = first->device;
    DEVICE;
    for (unsigned i = 0; i < asked->count; i++) {
        metric_t *metric = &asked->metric[i];
        metric->code = NOT_SUPPORTED;
        for (int k = 0; k < GPM_VALUES; k++)
            if (gpm_ids[k] == metric->metric && second->value[k] >= 0) {
                metric->value = second->value[k];
                metric->code = SUCCESS;
            }
    }
    return SUCCESS;
}

/* ------------------------------------------------------------------------------------------- events */

static u64 newest_event(void) {
    u64 newest = 0;
    for (int i = 0; i < now_.count; i++)
        for (int k = 0; k < now_.gpu[i].event_count; k++)
            if (now_.gpu[i].event[k].sequence > newest) newest = now_.gpu[i].event[k].sequence;
    return newest;
}

int nvmlEventSetCreate(set_t **set) {
    LIBRARY;
    for (int i = 0; i < MAX_SETS; i++) {
        if (sets[i].used) continue;
        memset(&sets[i], 0, sizeof sets[i]);
        sets[i].used = 1;
        sets[i].seen = newest_event();
        *set = &sets[i];
        return SUCCESS;
    }
    return NO_MEMORY;
}

int nvmlEventSetFree(set_t *set) { LIBRARY; set->used = 0; return SUCCESS; }

int nvmlDeviceGetSupportedEventTypes(handle_t *handle, u64 *types) { DEVICE; *types = gpu->event_types; return SUCCESS; }

int nvmlDeviceRegisterEvents(handle_t *handle, u64 types, set_t *set) {
    DEVICE;
    if (!types || types & ~gpu->event_types) return NOT_SUPPORTED;
    if (!set || !set->used || set->count == MAX_GPUS) return INVALID_ARGUMENT;
    set->gpu[set->count] = handle;
    set->types[set->count++] = types;
    return SUCCESS;
}

/* The oldest event that this set has not told yet; GPU_IS_LOST if there is none and one of its GPUs is gone. */
static int next_event(set_t *set, event_t *data) {
    const happening_t *next = NULL;
    int from = 0, lost = 0;
    for (int i = 0; i < set->count; i++) {
        const gpu_t *gpu = owner_of(set->gpu[i]);
        if (!gpu || gpu->lost) lost = 1;
        for (int k = 0; gpu && k < gpu->event_count; k++) {
            const happening_t *event = &gpu->event[k];
            if (event->sequence <= set->seen || !(event->type & set->types[i])) continue;
            if (!next || event->sequence < next->sequence) { next = event; from = i; }
        }
    }
    if (!next) return lost ? GPU_IS_LOST : TIMEOUT;
    set->seen = next->sequence;
    *data = (event_t){set->gpu[from], next->type, next->data, 0xFFFFFFFFu, 0xFFFFFFFFu};
    return SUCCESS;
}

int nvmlEventSetWait_v2(set_t *set, event_t *data, unsigned timeout_ms) {
    LIBRARY;
    if (!set || !set->used) return INVALID_ARGUMENT;
    double until = seconds_now() + timeout_ms / 1000.0;
    for (;;) {
        pthread_mutex_lock(&lock);
        refresh();
        int code = next_event(set, data);
        pthread_mutex_unlock(&lock);
        if (code != TIMEOUT || seconds_now() >= until) return code;
        pause_for(0.005);
    }
}
