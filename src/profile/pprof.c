#include "profile/pprof.h"

#include "os/clock.h"
#include "os/syscall.h"
#include "os/text.h"
#include "profile/unwind.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <link.h>
#include <stdbool.h>
#include <string.h>

#define OUT_BYTES     8192
#define MESSAGE_BYTES 1024 /* the longest message within another: a sample of SAMPLE_DEPTH_MOST places */
#define MAPPINGS_MOST 4096
#define BUILD_ID_MOST 32

/* Field numbers of profile.proto's messages. */
enum {
    PROFILE_SAMPLE_TYPE = 1,
    PROFILE_SAMPLE = 2,
    PROFILE_MAPPING = 3,
    PROFILE_LOCATION = 4,
    PROFILE_STRING = 6,
    PROFILE_DROP_FRAMES = 7,
    PROFILE_TIME_NS = 9,
    PROFILE_PERIOD_TYPE = 11,
    PROFILE_PERIOD = 12,
    PROFILE_COMMENT = 13,
    PROFILE_DEFAULT_TYPE = 14,
    TYPE_TYPE = 1,
    TYPE_UNIT = 2,
    SAMPLE_LOCATION = 1,
    SAMPLE_VALUE = 2,
    MAPPING_ID = 1,
    MAPPING_START = 2,
    MAPPING_LIMIT = 3,
    MAPPING_OFFSET = 4,
    MAPPING_FILE = 5,
    MAPPING_BUILD_ID = 6,
    LOCATION_ID = 1,
    LOCATION_MAPPING = 2,
    LOCATION_ADDRESS = 3,
};

enum { WIRE_NUMBER = 0, WIRE_BYTES = 2 };

struct out {
    int descriptor;
    int error;
    size_t length;
    unsigned char bytes[OUT_BYTES];
};

static void flush(struct out *out) {
    size_t done = 0;
    while (done < out->length && out->error == 0) {
        long wrote = os_syscall(SYS_write, out->descriptor, (long)(out->bytes + done),
                                (long)(out->length - done), 0, 0, 0);
        if (wrote > 0) {
            done += (size_t)wrote;
        } else if (wrote != -EINTR) {
            out->error = wrote == 0 ? EIO : (int)-wrote;
        }
    }
    out->length = 0;
}

static void put_bytes(struct out *out, const void *bytes, size_t length) {
    while (length > 0) {
        if (out->length == OUT_BYTES) {
            flush(out);
        }
        size_t part = OUT_BYTES - out->length < length ? OUT_BYTES - out->length : length;
        memcpy(out->bytes + out->length, bytes, part);
        out->length += part;
        bytes = (const unsigned char *)bytes + part;
        length -= part;
    }
}

/* A message within another, which comes after its length. */
struct message {
    size_t length;
    unsigned char bytes[MESSAGE_BYTES];
};

static size_t put_number(unsigned char *to, uint64_t number) {
    size_t length = 0;
    while (number >= 0x80) {
        to[length++] = (unsigned char)(number | 0x80);
        number >>= 7;
    }
    to[length++] = (unsigned char)number;
    return length;
}

static void add_number(struct message *message, unsigned field, uint64_t number) {
    unsigned char encoded[20];
    size_t length = put_number(encoded, field << 3 | WIRE_NUMBER);
    length += put_number(encoded + length, number);
    if (length <= MESSAGE_BYTES - message->length) {
        memcpy(message->bytes + message->length, encoded, length);
        message->length += length;
    }
}

static void write_number(struct out *out, unsigned field, uint64_t number) {
    struct message message = {0};
    add_number(&message, field, number);
    put_bytes(out, message.bytes, message.length);
}

static void write_bytes(struct out *out, unsigned field, const void *bytes, size_t length) {
    unsigned char head[20];
    size_t head_length = put_number(head, field << 3 | WIRE_BYTES);
    head_length += put_number(head + head_length, length);
    put_bytes(out, head, head_length);
    put_bytes(out, bytes, length);
}

static void write_message(struct out *out, unsigned field, const struct message *message) {
    write_bytes(out, field, message->bytes, message->length);
}

/* The strings that every profile has, in the order of their numbers; those of mappings follow. */
enum {
    STRING_NONE,
    STRING_ALLOC_OBJECTS,
    STRING_COUNT,
    STRING_ALLOC_SPACE,
    STRING_BYTES,
    STRING_INUSE_OBJECTS,
    STRING_INUSE_SPACE,
    STRING_SPACE,
    STRING_PEAK_OBJECTS,
    STRING_PEAK_SPACE,
    STRING_FREED_LIFETIME,
    STRING_NANOSECONDS,
    STRING_INUSE_AGE,
    STRING_DROP_FRAMES,
    STRING_COMMENT,
    STRINGS
};

/* Of this library, where it is part of the program. */
static const char own_frames[] = "allocate_(slow|large|counted|aligned|zeroed)|allocator_allocate|reallocate|"
                                 "new_slow|malloc|calloc|realloc|"
                                 "reallocarray|aligned_alloc|memalign|posix_memalign|p?valloc|calm_.*|"
                                 "operator new.*";

struct mapping {
    uintptr_t start;
    uintptr_t limit;
    uint64_t offset;
    size_t build_id_length;
    unsigned char build_id[BUILD_ID_MOST];
};

/* What is put together of a process before it is written. Its memory is a range of its own. */
struct picture {
    size_t mappings;
    size_t addresses;
    struct mapping mapping[MAPPINGS_MOST];
    uintptr_t address[]; /* of all stacks: sorted, each once */
};

static void write_type(struct out *out, unsigned field, uint64_t type, uint64_t unit) {
    struct message message = {0};
    add_number(&message, TYPE_TYPE, type);
    add_number(&message, TYPE_UNIT, unit);
    write_message(out, field, &message);
}

static void write_heads(struct out *out, uint64_t mean_bytes, uint64_t dropped) {
    static const char *const strings[] = {"",
                                          "alloc_objects",
                                          "count",
                                          "alloc_space",
                                          "bytes",
                                          "inuse_objects",
                                          "inuse_space",
                                          "space",
                                          "peak_objects",
                                          "peak_space",
                                          "freed_lifetime",
                                          "nanoseconds",
                                          "inuse_age"};
    write_type(out, PROFILE_SAMPLE_TYPE, STRING_ALLOC_OBJECTS, STRING_COUNT);
    write_type(out, PROFILE_SAMPLE_TYPE, STRING_ALLOC_SPACE, STRING_BYTES);
    write_type(out, PROFILE_SAMPLE_TYPE, STRING_INUSE_OBJECTS, STRING_COUNT);
    write_type(out, PROFILE_SAMPLE_TYPE, STRING_INUSE_SPACE, STRING_BYTES);
    write_type(out, PROFILE_SAMPLE_TYPE, STRING_PEAK_OBJECTS, STRING_COUNT);
    write_type(out, PROFILE_SAMPLE_TYPE, STRING_PEAK_SPACE, STRING_BYTES);
    write_type(out, PROFILE_SAMPLE_TYPE, STRING_FREED_LIFETIME, STRING_NANOSECONDS);
    write_type(out, PROFILE_SAMPLE_TYPE, STRING_INUSE_AGE, STRING_NANOSECONDS);
    for (size_t i = 0; i < sizeof strings / sizeof strings[0]; i++) {
        write_bytes(out, PROFILE_STRING, strings[i], strlen(strings[i]));
    }
    const char *hidden = unwind_hides_itself() ? "" : own_frames;
    write_bytes(out, PROFILE_STRING, hidden, strlen(hidden));
    struct text comment = {0};
    text_string(&comment, "calmalloc: ");
    text_number(&comment, dropped);
    text_string(&comment, " samples dropped for want of room");
    write_bytes(out, PROFILE_STRING, comment.bytes, comment.length);
    write_number(out, PROFILE_TIME_NS, clock_read_ns(CLOCK_REALTIME));
    write_type(out, PROFILE_PERIOD_TYPE, STRING_SPACE, STRING_BYTES);
    write_number(out, PROFILE_PERIOD, mean_bytes);
    write_number(out, PROFILE_DEFAULT_TYPE, STRING_INUSE_SPACE);
    if (*hidden != '\0') {
        write_number(out, PROFILE_DROP_FRAMES, STRING_DROP_FRAMES);
    }
    if (dropped > 0) {
        write_number(out, PROFILE_COMMENT, STRING_COMMENT);
    }
}

static uint64_t read_hex(const char **text) {
    uint64_t number = 0;
    for (;; ++*text) {
        char digit = **text;
        if (digit >= '0' && digit <= '9') {
            number = number << 4 | (unsigned)(digit - '0');
        } else if (digit >= 'a' && digit <= 'f') {
            number = number << 4 | (unsigned)(digit - 'a' + 10);
        } else {
            return number;
        }
    }
}

/* "start-limit rwxp offset device inode    name": what is code, and has a name. */
static const char *parse_mapping(const char *line, struct mapping *mapping) {
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

static void take_mapping(struct out *out, struct picture *picture, const char *line) {
    if (picture->mappings < MAPPINGS_MOST) {
        const char *name = parse_mapping(line, &picture->mapping[picture->mappings]);
        if (name != NULL) {
            picture->mappings++;
            write_bytes(out, PROFILE_STRING, name, strlen(name));
        }
    }
}

/* Their names become strings, one for each. A line that does not fit is passed over. */
static void read_mappings(struct out *out, struct picture *picture) {
    char lines[PATH_MAX + 256] = {0};
    size_t held = 0;
    long descriptor =
        os_syscall(SYS_openat, AT_FDCWD, (long)"/proc/self/maps", O_RDONLY | O_CLOEXEC, 0, 0, 0);
    while (descriptor >= 0) {
        long got =
            os_syscall(SYS_read, descriptor, (long)(lines + held), (long)(sizeof lines - held), 0, 0, 0);
        if (got == -EINTR) {
            continue;
        }
        if (got <= 0) {
            break;
        }
        held += (size_t)got;
        char *line = lines;
        for (char *end; (end = memchr(line, '\n', held)) != NULL; line = end + 1) {
            *end = '\0';
            held -= (size_t)(end + 1 - line);
            take_mapping(out, picture, line);
        }
        memmove(lines, line, held);
        held = held == sizeof lines ? 0 : held;
    }
    if (descriptor >= 0) {
        os_syscall(SYS_close, descriptor, 0, 0, 0, 0, 0);
    }
}

static struct mapping *find_mapping(struct picture *picture, uintptr_t address) {
    size_t low = 0;
    size_t high = picture->mappings;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (picture->mapping[middle].limit <= address) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low < picture->mappings && picture->mapping[low].start <= address ? &picture->mapping[low] : NULL;
}

/* The note "GNU" of type 3. */
static void find_build_id(const char *notes, size_t bytes, struct mapping *mapping) {
    while (bytes >= sizeof(ElfW(Nhdr))) {
        ElfW(Nhdr) note;
        memcpy(&note, notes, sizeof note);
        size_t name = ((size_t)note.n_namesz + 3) & ~(size_t)3;
        size_t body = ((size_t)note.n_descsz + 3) & ~(size_t)3;
        if (name > bytes - sizeof note || body > bytes - sizeof note - name) {
            return;
        }
        if (note.n_type == NT_GNU_BUILD_ID && note.n_namesz == 4 &&
            memcmp(notes + sizeof note, "GNU", 4) == 0 && note.n_descsz <= BUILD_ID_MOST) {
            mapping->build_id_length = note.n_descsz;
            memcpy(mapping->build_id, notes + sizeof note + name, note.n_descsz);
            return;
        }
        notes += sizeof note + name + body;
        bytes -= sizeof note + name + body;
    }
}

/* A module's notes are there for as long as the loader's lock is held. */
static int take_build_ids(struct dl_phdr_info *info, size_t size, void *context) {
    (void)size;
    struct picture *picture = context;
    for (size_t i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *code = &info->dlpi_phdr[i];
        struct mapping *mapping = code->p_type == PT_LOAD && (code->p_flags & PF_X) != 0
                                      ? find_mapping(picture, info->dlpi_addr + code->p_vaddr)
                                      : NULL;
        for (size_t j = 0; mapping != NULL && j < info->dlpi_phnum; j++) {
            const ElfW(Phdr) *notes = &info->dlpi_phdr[j];
            if (notes->p_type == PT_NOTE && mapping->build_id_length == 0) {
                find_build_id((const char *)(uintptr_t)(info->dlpi_addr + notes->p_vaddr), notes->p_memsz,
                              mapping);
            }
        }
    }
    return 0;
}

static void write_mappings(struct out *out, const struct picture *picture) {
    size_t next_string = STRINGS + picture->mappings;
    for (size_t i = 0; i < picture->mappings; i++) {
        const struct mapping *mapping = &picture->mapping[i];
        struct message message = {0};
        add_number(&message, MAPPING_ID, i + 1);
        add_number(&message, MAPPING_START, mapping->start);
        add_number(&message, MAPPING_LIMIT, mapping->limit);
        add_number(&message, MAPPING_OFFSET, mapping->offset);
        add_number(&message, MAPPING_FILE, STRINGS + i);
        if (mapping->build_id_length > 0) {
            char digits[2 * BUILD_ID_MOST];
            for (size_t byte = 0; byte < mapping->build_id_length; byte++) {
                digits[2 * byte] = "0123456789abcdef"[mapping->build_id[byte] >> 4];
                digits[2 * byte + 1] = "0123456789abcdef"[mapping->build_id[byte] & 15];
            }
            write_bytes(out, PROFILE_STRING, digits, 2 * mapping->build_id_length);
            add_number(&message, MAPPING_BUILD_ID, next_string++);
        }
        write_message(out, PROFILE_MAPPING, &message);
    }
}

static void sift(uintptr_t *heap, size_t root, size_t count) {
    for (size_t child; (child = 2 * root + 1) < count; root = child) {
        child += child + 1 < count && heap[child] < heap[child + 1];
        if (heap[root] >= heap[child]) {
            return;
        }
        uintptr_t lower = heap[root];
        heap[root] = heap[child];
        heap[child] = lower;
    }
}

/* In place, and never slow: Williams' heap sort. */
static void sort(uintptr_t *numbers, size_t count) {
    for (size_t root = count / 2; root-- > 0;) {
        sift(numbers, root, count);
    }
    for (size_t end = count; end-- > 1;) {
        uintptr_t most = numbers[0];
        numbers[0] = numbers[end];
        numbers[end] = most;
        sift(numbers, 0, end);
    }
}

/* A place is known by its address. */
static void write_locations(struct out *out, struct picture *picture) {
    sort(picture->address, picture->addresses);
    for (size_t i = 0; i < picture->addresses; i++) {
        uintptr_t address = picture->address[i];
        if (i > 0 && address == picture->address[i - 1]) {
            continue;
        }
        const struct mapping *mapping = find_mapping(picture, address);
        struct message message = {0};
        add_number(&message, LOCATION_ID, address);
        if (mapping != NULL) {
            add_number(&message, LOCATION_MAPPING, (uint64_t)(mapping - picture->mapping) + 1);
        }
        add_number(&message, LOCATION_ADDRESS, address);
        write_message(out, PROFILE_LOCATION, &message);
    }
}

static uint64_t blocks(uint64_t count) {
    return (count + SAMPLE_COUNT_UNIT / 2) / SAMPLE_COUNT_UNIT;
}

/* Each stack, and its addresses into the picture: before a return address is the call. */
static void write_samples(struct out *out, struct samples *samples, size_t count, struct picture *picture,
                          size_t addresses_most) {
    uint64_t now_ns = clock_now_ns();
    for (size_t number = 1; number <= count; number++) {
        const uintptr_t *addresses;
        size_t depth;
        struct sample_sums sums = samples_read(samples, number, now_ns, &addresses, &depth);
        struct message message = {0};
        for (size_t i = 0; i < depth && picture->addresses < addresses_most; i++) {
            picture->address[picture->addresses++] = addresses[i] - 1;
            add_number(&message, SAMPLE_LOCATION, addresses[i] - 1);
        }
        add_number(&message, SAMPLE_VALUE, blocks(sums.allocated.count));
        add_number(&message, SAMPLE_VALUE, sums.allocated.bytes);
        add_number(&message, SAMPLE_VALUE, blocks(sums.in_use.count));
        add_number(&message, SAMPLE_VALUE, sums.in_use.bytes);
        add_number(&message, SAMPLE_VALUE, blocks(sums.at_peak.count));
        add_number(&message, SAMPLE_VALUE, sums.at_peak.bytes);
        add_number(&message, SAMPLE_VALUE, sums.lifetime_ns);
        add_number(&message, SAMPLE_VALUE, sums.age_ns);
        write_message(out, PROFILE_SAMPLE, &message);
    }
}

int pprof_write(struct samples *samples, uint64_t mean_bytes, const char *path, bool anew) {
    size_t page = os_page_size();
    size_t count = samples_stack_count(samples);
    size_t addresses_most = samples_address_count(samples);
    size_t bytes = sizeof(struct picture) + addresses_most * sizeof(uintptr_t);
    bytes = (bytes + page - 1) & ~(page - 1);
    struct picture *picture = os_reserve(bytes, page);
    if (picture == NULL) {
        return ENOMEM;
    }
    struct out out = {.error = ENOMEM};
    if (os_commit(picture, bytes)) {
        if (anew) {
            os_syscall(SYS_unlinkat, AT_FDCWD, (long)path, 0, 0, 0, 0);
        }
        out.descriptor = (int)os_syscall(
            SYS_openat, AT_FDCWD, (long)path,
            O_WRONLY | O_CREAT | O_CLOEXEC | (anew ? O_EXCL | O_NOFOLLOW : O_TRUNC), 0666, 0, 0);
        out.error = out.descriptor < 0 ? -out.descriptor : 0;
    }
    if (out.error == 0) {
        write_heads(&out, mean_bytes, atomic_load_explicit(&samples->dropped, memory_order_relaxed));
        read_mappings(&out, picture);
        dl_iterate_phdr(take_build_ids, picture);
        write_mappings(&out, picture);
        write_samples(&out, samples, count, picture, addresses_most);
        write_locations(&out, picture);
        flush(&out);
        long closed = os_syscall(SYS_close, out.descriptor, 0, 0, 0, 0, 0);
        out.error = out.error == 0 && closed < 0 ? (int)-closed : out.error;
    }
    os_release(picture, bytes);
    return out.error;
}
