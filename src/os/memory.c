#include "os/memory.h"

#include "base/size.h"
#include "os/cgroup.h"
#include "os/file.h"
#include "os/syscall.h"
#include "os/text.h"

#include <stdatomic.h>
#include <sys/sysinfo.h>

size_t memory_total_bytes(void) {
    static _Atomic(size_t) total; /* if two threads store a result, either is right */
    size_t known = atomic_load_explicit(&total, memory_order_relaxed);
    if (known == 0) {
        struct sysinfo info = {0};
        os_syscall(SYS_sysinfo, &info);
        known = (size_t)info.totalram * info.mem_unit;
        atomic_store_explicit(&total, known, memory_order_relaxed);
    }
    return known;
}

static size_t machine_available_bytes(const char *root) {
    enum { TOTAL, AVAILABLE, HUGETLB, FIELDS };
    static const char *const names[FIELDS] = {"MemTotal", "MemAvailable", "Hugetlb"};
    uint64_t kib[FIELDS] = {0, UINT64_MAX, 0};
    char path[FILE_MAX_PATH];
    file_read_named_numbers(text_print(path, sizeof path, "%s/proc/meminfo", root), names, kib, FIELDS);
    if (kib[AVAILABLE] == UINT64_MAX || kib[TOTAL] < kib[HUGETLB]) {
        return SIZE_MAX;
    }
    uint64_t total = kib[TOTAL] - kib[HUGETLB];
    if (kib[AVAILABLE] < total / 5 &&
        cgroup_is_under_pressure(text_print(path, sizeof path, "%s/proc/pressure/memory", root))) {
        return 0;
    }
    return size_minus(kib[AVAILABLE], total / 20) << 10;
}

size_t memory_available_bytes(const char *root, size_t *limit) {
    uint64_t group_limit;
    size_t available = size_min(cgroup_available_bytes(root, &group_limit), machine_available_bytes(root));
    *limit = size_min(memory_total_bytes(), group_limit);
    return available;
}
