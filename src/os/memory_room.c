#include "os/memory_room.h"

#include "os/cgroup.h"
#include "os/file.h"

#include <stdint.h>

struct machine {
    uint64_t total_kib, available_kib, hugetlb_kib;
};

static void note_line(void *context, const char *line) {
    struct machine *machine = context;
    uint64_t total = file_line_number(line, "MemTotal");
    uint64_t available = file_line_number(line, "MemAvailable");
    uint64_t hugetlb = file_line_number(line, "Hugetlb");
    machine->total_kib = total == UINT64_MAX ? machine->total_kib : total;
    machine->available_kib = available == UINT64_MAX ? machine->available_kib : available;
    machine->hugetlb_kib = hugetlb == UINT64_MAX ? machine->hugetlb_kib : hugetlb;
}

/* A path below root, in room for it; an empty one if it is too long. */
static const char *below(char *room, size_t bytes, const char *root, const char *path) {
    const char *const parts[] = {root, path};
    size_t length = 0;
    for (size_t i = 0; i < 2; i++) {
        for (const char *from = parts[i]; *from != '\0'; from++) {
            if (length + 1 == bytes) {
                return "";
            }
            room[length++] = *from;
        }
    }
    room[length] = '\0';
    return room;
}

static uint64_t machine_room(const char *root) {
    char path[FILE_LINE_BYTES];
    struct machine machine = {0, UINT64_MAX, 0};
    if (!file_each_line(below(path, sizeof path, root, "/proc/meminfo"), note_line, &machine) ||
        machine.available_kib == UINT64_MAX || machine.total_kib < machine.hugetlb_kib) {
        return UINT64_MAX;
    }
    uint64_t total = machine.total_kib - machine.hugetlb_kib;
    if (machine.available_kib < total / 5 &&
        cgroup_is_pressed(below(path, sizeof path, root, "/proc/pressure/memory"))) {
        return 0;
    }
    return machine.available_kib > total / 20 ? (machine.available_kib - total / 20) << 10 : 0;
}

size_t memory_room_bytes_in(const char *root) {
    uint64_t group = cgroup_memory_room_in(root);
    uint64_t machine = machine_room(root);
    uint64_t room = group < machine ? group : machine;
    return room < SIZE_MAX ? (size_t)room : SIZE_MAX;
}

size_t memory_room_bytes(void) {
    return memory_room_bytes_in("");
}
