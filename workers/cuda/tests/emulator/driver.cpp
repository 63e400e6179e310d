// A driver that has no device: the functions of libcuda.so that fiec-cuda calls, over the host's
// memory, running the kernels of kernels.cu by cuda_on_cpu.h. It is stricter than a real one.
//
// Each allocation ends where an unmapped page begins and is filled with NaNs; a copy that leaves
// its allocation is refused; what is left behind can be asked for (fiec_emulator_count).
#include "cuda_on_cpu.h"
#include "../../kernels/kernels.cu"

#include <map>
#include <string>
#include <sys/mman.h>
#include <unistd.h>

static const emulator::Entry KERNELS[] = {
#define KERNEL(name) emulator::entry(#name, name)
    KERNEL(fiec_gemm), KERNEL(fiec_gemm_t), KERNEL(fiec_gemm_apart), KERNEL(fiec_gemm_t_apart),
    KERNEL(fiec_gemm_take), KERNEL(fiec_solve_leaf), KERNEL(fiec_exchange),
    KERNEL(fiec_cg_product), KERNEL(fiec_cg_alpha), KERNEL(fiec_cg_residual),
    KERNEL(fiec_cg_beta), KERNEL(fiec_cg_direction),
};

extern char __start_fiec_shared[], __stop_fiec_shared[];

static void emulator::poison_shared() {
    memset(__start_fiec_shared, 0xff, __stop_fiec_shared - __start_fiec_shared);
}

enum { OK = 0, INVALID = 1, NO_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, NOT_FOUND = 500,
       ILLEGAL_ADDRESS = 700, LAUNCH_FAILED = 719 };

struct Allocation { size_t bytes, mapped; char* base; };
static std::map<uintptr_t, Allocation> allocations;
static size_t held, peak;
static unsigned long long contexts, streams, modules, launches, made_contexts;
static bool initialized;
static int sticky = OK;

static size_t memory = 1ull << 30, devices = 1, fail_launch = 0, handles = 0;
static size_t total() { return memory; }

static bool inside(uintptr_t at, size_t bytes) {
    auto next = allocations.upper_bound(at);
    if (bytes == 0) return true;
    if (next == allocations.begin()) return false;
    --next;
    return at + bytes <= next->first + next->second.bytes;
}

extern "C" {

unsigned long long fiec_emulator_count(const char* what) {
    std::string name = what;
    if (name == "bytes") return held;
    if (name == "peak") return peak;
    if (name == "allocations") return allocations.size();
    if (name == "contexts") return contexts;
    if (name == "made_contexts") return made_contexts;
    if (name == "streams") return streams;
    if (name == "modules") return modules;
    if (name == "launches") return launches;
    if (name == "handles") return handles;
    return ~0ull;
}

// "memory" of the device, "devices", and how many launches from now the one is that fails.
void fiec_emulator_set(const char* what, unsigned long long value) {
    std::string name = what;
    if (name == "memory") memory = value;
    if (name == "devices") devices = value;
    if (name == "fail_launch") { fail_launch = value ? launches + value : 0; sticky = OK; }
}
// For the libraries beside: how many of their handles there are.
void fiec_emulator_handles(int change) { handles += change; }
bool fiec_emulator_inside(const void* at, size_t bytes) { return inside((uintptr_t)at, bytes); }

int cuInit(unsigned) {
    if (devices == 0) return NO_DEVICE;
    initialized = true;
    return OK;
}
int cuDriverGetVersion(int* version) { *version = 13000; return OK; }
int cuDeviceGetCount(int* count) {
    if (!initialized) return NOT_INITIALIZED;
    *count = 1;
    return OK;
}
int cuDeviceGet(int* device, int ordinal) { *device = ordinal; return ordinal == 0 ? OK : INVALID; }
int cuDeviceGetName(char* name, int length, int) {
    snprintf(name, length, "emulated on a CPU");
    return OK;
}
int cuDeviceGetUuid_v2(char* uuid, int) {
    for (int i = 0; i < 16; i++) uuid[i] = char(i * 17);
    return OK;
}
int cuDeviceGetUuid(char* uuid, int device) { return cuDeviceGetUuid_v2(uuid, device); }
int cuDeviceTotalMem_v2(size_t* bytes, int) { *bytes = total(); return OK; }
int cuDeviceGetAttribute(int* value, int which, int) {
    switch (which) {
        case 16: *value = 2; return OK;        // multiprocessors
        case 13: *value = 1000000; return OK;  // clock rate in kHz
        case 75: *value = 9; return OK;        // compute capability
        case 76: *value = 0; return OK;
        case 115: *value = 1; return OK;       // memory pools
        default: *value = 0; return OK;
    }
}
int cuDevicePrimaryCtxRetain(void** context, int) {
    if (!initialized) return NOT_INITIALIZED;
    static char it;
    *context = &it;
    if (contexts++ == 0) made_contexts++;
    return OK;
}
int cuDevicePrimaryCtxRelease_v2(int) {
    if (contexts == 0) return INVALID;
    contexts--;
    return OK;
}
static bool is_current;
int cuCtxSetCurrent(void* context) { is_current = context != 0; return OK; }
int cuCtxGetCurrent(void** context) { *context = 0; return OK; }
int cuCtxSynchronize() { return sticky; }
int cuMemGetInfo_v2(size_t* free, size_t* all) { *all = total(); *free = total() - held; return OK; }
int cuMemAlloc_v2(uintptr_t* to, size_t bytes) {
    if (!is_current || bytes == 0) return INVALID;
    if (held + bytes > total()) return NO_MEMORY;
    const size_t page = sysconf(_SC_PAGESIZE), rounded = (bytes + 7) / 8 * 8;
    const size_t mapped = (rounded + page - 1) / page * page + 2 * page;
    char* base = (char*)mmap(0, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) return NO_MEMORY;
    mprotect(base + page, mapped - 2 * page, PROT_READ | PROT_WRITE);
    memset(base + page, 0xff, mapped - 2 * page);
    const uintptr_t at = (uintptr_t)(base + mapped - page - rounded);
    allocations[at] = Allocation{bytes, mapped, base};
    held += bytes;
    if (held > peak) peak = held;
    *to = at;
    return OK;
}
int cuMemFree_v2(uintptr_t at) {
    auto found = allocations.find(at);
    if (found == allocations.end()) return INVALID;
    held -= found->second.bytes;
    munmap(found->second.base, found->second.mapped);
    allocations.erase(found);
    return OK;
}
int cuMemcpyHtoD_v2(uintptr_t to, const void* from, size_t bytes) {
    if (!inside(to, bytes)) return INVALID;
    memcpy((void*)to, from, bytes);
    return OK;
}
int cuMemcpyDtoH_v2(void* to, uintptr_t from, size_t bytes) {
    if (sticky) return sticky;
    if (!inside(from, bytes)) return INVALID;
    memcpy(to, (void*)from, bytes);
    return OK;
}
int cuMemcpyHtoDAsync_v2(uintptr_t to, const void* from, size_t bytes, void*) {
    return cuMemcpyHtoD_v2(to, from, bytes);
}
int cuMemcpyDtoHAsync_v2(void* to, uintptr_t from, size_t bytes, void*) {
    return cuMemcpyDtoH_v2(to, from, bytes);
}
struct Copy2D {
    size_t src_x, src_y; unsigned src_type; const char* src_host; uintptr_t src_device; void* src_array;
    size_t src_pitch, dst_x, dst_y; unsigned dst_type; char* dst_host; uintptr_t dst_device;
    void* dst_array; size_t dst_pitch, width, height;
};
int cuMemcpy2DAsync_v2(const Copy2D* c, void*) {
    if (sticky) return sticky;
    const char* from = c->src_type == 2 ? (const char*)c->src_device : c->src_host;
    char* to = c->dst_type == 2 ? (char*)c->dst_device : c->dst_host;
    if (c->width > c->src_pitch || c->width > c->dst_pitch) return INVALID;
    for (size_t j = 0; j < c->height; j++) {
        const char* a = from + c->src_x + (c->src_y + j) * c->src_pitch;
        char* b = to + c->dst_x + (c->dst_y + j) * c->dst_pitch;
        if (c->src_type == 2 && !inside((uintptr_t)a, c->width)) return INVALID;
        if (c->dst_type == 2 && !inside((uintptr_t)b, c->width)) return INVALID;
        memcpy(b, a, c->width);
    }
    return OK;
}
int cuMemcpy2D_v2(const Copy2D* c) { return cuMemcpy2DAsync_v2(c, 0); }
int cuMemsetD8Async(uintptr_t at, unsigned char value, size_t bytes, void*) {
    if (!inside(at, bytes)) return INVALID;
    memset((void*)at, value, bytes);
    return OK;
}
int cuMemsetD2D32Async(uintptr_t at, size_t pitch, unsigned value, size_t width, size_t height, void*) {
    for (size_t j = 0; j < height; j++) {
        if (!inside(at + j * pitch, 4 * width)) return INVALID;
        for (size_t i = 0; i < width; i++) ((unsigned*)(at + j * pitch))[i] = value;
    }
    return OK;
}
int cuStreamCreate(void** stream, unsigned) {
    static char it;
    *stream = &it;
    streams++;
    return OK;
}
int cuStreamSynchronize(void*) { return sticky; }
int cuStreamDestroy_v2(void*) { streams--; return OK; }
static std::string text;
int cuModuleLoadData(void** module, const void* image) {
    text = (const char*)image;
    if (text.find(".version") == std::string::npos) return 218;
    static char it;
    *module = &it;
    modules++;
    return OK;
}
int cuModuleUnload(void*) { modules--; return OK; }
int cuModuleGetFunction(void** function, void*, const char* name) {
    // It must be in the PTX that was loaded, with as many parameters as the source has.
    const size_t at = text.find(std::string(".entry ") + name + "(");
    if (at == std::string::npos) return NOT_FOUND;
    for (const auto& kernel : KERNELS)
        if (!strcmp(kernel.name, name)) {
            unsigned parameters = 0;
            const size_t end = text.find("\n)", at);
            for (size_t p = at; (p = text.find(".param", p)) < end; p++) parameters++;
            if (parameters != kernel.parameters) return INVALID;
            *function = (void*)&kernel;
            return OK;
        }
    return NOT_FOUND;
}
int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned, void*, void** arguments, void**) {
    if (sticky) return sticky;
    if (!gx || !gy || !gz || !bx || by != 1 || bz != 1 || bx > 1024 || gy > 65535 || gz > 65535)
        return INVALID;
    launches++;
    if (launches == fail_launch) return sticky = LAUNCH_FAILED;
    const auto& kernel = *(const emulator::Entry*)function;
    if (!emulator::launch(kernel, {gx, gy, gz}, {bx, by, bz}, arguments)) {
        fprintf(stderr, "emulator: threads of %s left while others waited\n", kernel.name);
        return sticky = LAUNCH_FAILED;
    }
    return OK;
}
int cuDeviceGetDefaultMemPool(void** pool, int) { static char it; *pool = &it; return OK; }
int cuMemPoolTrimTo(void*, size_t) { return OK; }
int cuGetErrorName(int, const char** name) { *name = "EMULATED_ERROR"; return OK; }
int cuGetErrorString(int code, const char** words) {
    *words = code == NO_MEMORY ? "out of memory" : code == NO_DEVICE ? "no device is detected"
           : code == LAUNCH_FAILED ? "launch failed" : "refused by the emulator";
    return OK;
}

}  // extern "C"
