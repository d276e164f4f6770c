#include "offload/topology.h"

#include "os/file.h"
#include "os/text.h"

/* A number above the levels of caches that machines have. L1 has two
 * entries. */
#define MAX_CACHE_INDEX 5

#define FOLDER "%s/sys/devices/system/cpu/cpu%u/"

bool topology_siblings(const char *root, unsigned cpu, struct cpu_set *siblings) {
    char path[FILE_MAX_PATH];
    text_print(path, sizeof path, FOLDER "topology/thread_siblings_list", root, cpu);
    bool listed = cpu_set_read(siblings, path);
    cpu_set_add(siblings, cpu);
    return listed;
}

static uint32_t socket_of(const char *root, unsigned cpu) {
    char path[FILE_MAX_PATH];
    text_print(path, sizeof path, FOLDER "topology/physical_package_id", root, cpu);
    uint64_t socket = file_read_number(path);
    return socket > INT32_MAX ? 0 : (uint32_t)socket; /* "-1" if the firmware did not report it */
}

static uint32_t cache_of(const char *root, unsigned cpu, uint32_t socket) {
    char path[FILE_MAX_PATH];
    struct cpu_set sharing;
    /* /sys lists the caches nearest to the CPU first. */
    for (unsigned index = MAX_CACHE_INDEX + 1; index-- > 0;) {
        text_print(path, sizeof path, FOLDER "cache/index%u/shared_cpu_list", root, cpu, index);
        if (cpu_set_read(&sharing, path)) {
            return cpu_set_next(&sharing, 0);
        }
    }
    return MAX_CPUS + socket;
}

struct cpu_site topology_site(const char *root, unsigned cpu) {
    struct cpu_set siblings;
    topology_siblings(root, cpu, &siblings);
    uint32_t socket = socket_of(root, cpu);
    return (struct cpu_site){
        .core = cpu_set_next(&siblings, 0), .cache = cache_of(root, cpu, socket), .socket = socket};
}
