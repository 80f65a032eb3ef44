/* A libnvidia-ml.so.1 with two GPUs of known values, for the real Python binding to load.

   Set in the environment: NVML_STUB_INIT (what initialising returns), NVML_STUB_FAIL_AFTER (after so many questions for power the
   GPU is lost), NVML_STUB_NO_ENERGY (the cards don't count their energy), NVML_STUB_HANG_AFTER (the same, and no answer comes).

   GPU i: power 100 (i + 1) W, one watt more with each question; energy 3 (i + 1) J more with each question; memory 1 + i GiB of 80;
   utilisation 50 + i; SM clock 1500 + i, memory clock 2600 + i MHz; temperature 40 + i. */

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, GPU_IS_LOST = 15, GPUS = 2, SM_CLOCK = 1, MEMORY_CLOCK = 2 };

typedef struct { int index; unsigned power_asked; unsigned long long energy_asked; } gpu;
typedef struct { unsigned long long total, free, used; } memory;
typedef struct { unsigned gpu, memory; } utilisation;

static gpu gpus[GPUS] = {{0, 0, 0}, {1, 0, 0}};

static int setting(const char *name, int otherwise)
{
    const char *value = getenv(name);
    return value ? atoi(value) : otherwise;
}

int nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    return setting("NVML_STUB_INIT", SUCCESS);
}

int nvmlShutdown(void)
{
    const char *path = getenv("NVML_STUB_SHUTDOWN_FILE");
    FILE *file = path ? fopen(path, "a") : NULL;
    if (file) {
        fputs("shutdown\n", file);
        fclose(file);
    }
    return SUCCESS;
}

const char *nvmlErrorString(int result)
{
    return result == GPU_IS_LOST ? "GPU is lost" : result == NOT_SUPPORTED ? "Not Supported" : "Other error";
}

int nvmlDeviceGetCount_v2(unsigned *count)
{
    *count = GPUS;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, gpu **device)
{
    if (index >= GPUS)
        return INVALID_ARGUMENT;
    *device = &gpus[index];
    return SUCCESS;
}

int nvmlDeviceGetUUID(gpu *device, char *uuid, unsigned length)
{
    snprintf(uuid, length, "GPU-%d0000000-aaaa-bbbb-cccc-dddddddddddd", device->index + 1);
    return SUCCESS;
}

int nvmlDeviceGetPowerUsage(gpu *device, unsigned *milliwatts)
{
    int lost = setting("NVML_STUB_FAIL_AFTER", -1), stuck = setting("NVML_STUB_HANG_AFTER", -1);
    if (stuck >= 0 && device->power_asked >= (unsigned)stuck)
        sleep(60);
    if (lost >= 0 && device->power_asked >= (unsigned)lost)
        return GPU_IS_LOST;
    *milliwatts = 100000u * (unsigned)(device->index + 1) + 1000u * device->power_asked++;
    return SUCCESS;
}

int nvmlDeviceGetTotalEnergyConsumption(gpu *device, unsigned long long *millijoules)
{
    if (setting("NVML_STUB_NO_ENERGY", 0))
        return NOT_SUPPORTED;
    *millijoules = 5000000ull + 3000ull * (unsigned)(device->index + 1) * device->energy_asked++;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(gpu *device, memory *info)
{
    info->total = 80ull << 30;
    info->used = (1ull + (unsigned)device->index) << 30;
    info->free = info->total - info->used;
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(gpu *device, utilisation *rates)
{
    rates->gpu = 50u + (unsigned)device->index;
    rates->memory = 30;
    return SUCCESS;
}

int nvmlDeviceGetClockInfo(gpu *device, unsigned kind, unsigned *megahertz)
{
    if (kind != SM_CLOCK && kind != MEMORY_CLOCK)
        return INVALID_ARGUMENT;
    *megahertz = (kind == SM_CLOCK ? 1500u : 2600u) + (unsigned)device->index;
    return SUCCESS;
}

int nvmlDeviceGetTemperature(gpu *device, unsigned sensor, unsigned *celsius)
{
    if (sensor != 0)
        return INVALID_ARGUMENT;
    *celsius = 40u + (unsigned)device->index;
    return SUCCESS;
}
