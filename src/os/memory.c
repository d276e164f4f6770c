#include "os/memory.h"

#include "base/size.h"
#include "os/cgroup.h"
#include "os/file.h"
#include "os/parse.h"
#include "os/syscall.h"
#include "os/text.h"

#include <sys/sysinfo.h>

size_t memory_total_bytes(void) {
    struct sysinfo info = {0};
    os_syscall(SYS_sysinfo, &info);
    return (size_t)info.totalram * info.mem_unit;
}

/* Fields of /proc/meminfo. */
enum { TOTAL, AVAILABLE, HUGETLB, FIELDS };

static bool note_field(void *context, const char *line) {
    static const char *const names[FIELDS] = {"MemTotal", "MemAvailable", "Hugetlb"};
    uint64_t *kib = context;
    for (int field = 0; field < FIELDS; field++) {
        uint64_t number = parse_named_number(line, names[field]);
        kib[field] = number == UINT64_MAX ? kib[field] : number;
    }
    return true;
}

static size_t machine_available_bytes(const char *root) {
    char path[FILE_MAX_PATH];
    uint64_t kib[FIELDS] = {0, UINT64_MAX, 0};
    file_each_part(text_print(path, sizeof path, "%s/proc/meminfo", root), '\n', note_field, kib);
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

size_t memory_available_bytes_in(const char *root) {
    return size_min(cgroup_available_bytes(root), machine_available_bytes(root));
}

size_t memory_available_bytes(void) {
    return memory_available_bytes_in("");
}
