#include "profile/mappings.h"

#include "os/file.h"
#include "os/syscall.h"

#include <limits.h>
#include <link.h>
#include <string.h>

static uint64_t read_hex(const char **text) {
    static const char digits[] = "0123456789abcdef";
    uint64_t number = 0;
    for (const char *digit; **text != '\0' && (digit = strchr(digits, **text)) != NULL; ++*text) {
        number = number << 4 | (uint64_t)(digit - digits);
    }
    return number;
}

/* Reads a line "start-limit rwxp offset device inode name". Returns the name.
 * Returns NULL if the mapping holds no code or has no name. */
static const char *mapping_parse(const char *line, struct mapping *mapping) {
    *mapping = (struct mapping){.start = read_hex(&line)};
    line += *line == '-';
    mapping->limit = read_hex(&line);
    if (strlen(line) < 6 || line[3] != 'x') {
        return NULL;
    }
    line += 6;
    mapping->offset = read_hex(&line);
    for (int words = 0; words < 2; words++) {
        line += strspn(line, " ");
        line += strcspn(line, " ");
    }
    line += strspn(line, " ");
    return *line == '\0' ? NULL : line;
}

/* Finds the note "GNU" of type 3. */
static void find_build_id(const char *notes, size_t bytes, struct mapping *mapping) {
    while (bytes >= sizeof(ElfW(Nhdr))) {
        ElfW(Nhdr) note;
        memcpy(&note, notes, sizeof note);
        size_t name = ((size_t)note.n_namesz + 3) & ~(size_t)3;
        size_t body = ((size_t)note.n_descsz + 3) & ~(size_t)3;
        if (name > bytes - sizeof note || body > bytes - sizeof note - name) {
            return;
        }
        notes += sizeof note + name;
        if (note.n_type == NT_GNU_BUILD_ID && note.n_namesz == 4 && memcmp(notes - name, "GNU", 4) == 0 &&
            note.n_descsz <= MAX_BUILD_ID_BYTES) {
            mapping->build_id_bytes = note.n_descsz;
            memcpy(mapping->build_id, notes, note.n_descsz);
            return;
        }
        notes += body;
        bytes -= sizeof note + name + body;
    }
}

/* The loader's lock is held during the call, and so the module's notes stay
 * mapped. */
static int take_build_ids(struct dl_phdr_info *info, size_t size, void *context) {
    (void)size;
    for (size_t i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *code = &info->dlpi_phdr[i];
        struct mapping *mapping = code->p_type == PT_LOAD && (code->p_flags & PF_X) != 0
                                      ? mappings_find(context, info->dlpi_addr + code->p_vaddr)
                                      : NULL;
        for (size_t j = 0; mapping != NULL && j < info->dlpi_phnum; j++) {
            const ElfW(Phdr) *notes = &info->dlpi_phdr[j];
            if (notes->p_type == PT_NOTE && mapping->build_id_bytes == 0) {
                find_build_id((const char *)(uintptr_t)(info->dlpi_addr + notes->p_vaddr), notes->p_memsz,
                              mapping);
            }
        }
    }
    return 0;
}

/* Skips a line that does not fit. */
void mappings_read(struct mappings *mappings, void (*take)(void *context, const char *name), void *context) {
    char lines[PATH_MAX + 256] = {0};
    size_t held = 0;
    long descriptor = file_open("/proc/self/maps");
    long got;
    while (descriptor >= 0 &&
           (got = os_syscall(SYS_read, descriptor, lines + held, sizeof lines - held)) > 0) {
        held += (size_t)got;
        char *line = lines;
        for (char *end; (end = memchr(line, '\n', held)) != NULL; line = end + 1) {
            *end = '\0';
            held -= (size_t)(end + 1 - line);
            const char *name =
                mappings->count < MAX_MAPPINGS ? mapping_parse(line, &mappings->of[mappings->count]) : NULL;
            if (name != NULL) {
                mappings->count++;
                take(context, name);
            }
        }
        memmove(lines, line, held);
        held = held == sizeof lines ? 0 : held;
    }
    if (descriptor >= 0) {
        os_syscall(SYS_close, descriptor);
    }
    dl_iterate_phdr(take_build_ids, mappings);
}

struct mapping *mappings_find(struct mappings *mappings, uintptr_t address) {
    size_t low = 0;
    size_t high = mappings->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (mappings->of[middle].limit <= address) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    struct mapping *found = &mappings->of[low];
    return low < mappings->count && found->start <= address ? found : NULL;
}
