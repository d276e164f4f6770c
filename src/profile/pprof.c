#include "profile/pprof.h"

#include "os/clock.h"
#include "os/file.h"
#include "os/random.h"
#include "os/syscall.h"
#include "os/text.h"
#include "profile/mappings.h"
#include "profile/unwind.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>

/* Field numbers of profile.proto's messages. */
enum { PROFILE_SAMPLE_TYPE = 1, PROFILE_SAMPLE, PROFILE_MAPPING, PROFILE_LOCATION, PROFILE_STRING = 6 };
enum { PROFILE_DROP_FRAMES = 7, PROFILE_TIME_NS = 9, PROFILE_PERIOD_TYPE = 11, PROFILE_PERIOD };
enum { PROFILE_COMMENT = 13, PROFILE_DEFAULT_TYPE };
enum { TYPE_TYPE = 1, TYPE_UNIT };
enum { SAMPLE_LOCATION = 1, SAMPLE_VALUE };
enum { MAPPING_ID = 1, MAPPING_START, MAPPING_LIMIT, MAPPING_OFFSET, MAPPING_FILE, MAPPING_BUILD_ID };
enum { LOCATION_ID = 1, LOCATION_MAPPING, LOCATION_ADDRESS };

/* The frames of this library for pprof to drop. If the library is a part of the
 * program, unwind_here cannot leave them out. */
static const char own_frames[] =
    "allocate_slow|allocate_large|allocate_counted|allocate_aligned|allocate_aligned_slow|allocate_zeroed|"
    "allocate_zeroed_slow|reallocate|reallocate_slow|reallocate_small|"
    "reallocate_elsewhere|new_slow|malloc|calloc|realloc|reallocarray|"
    "aligned_alloc|memalign|posix_memalign|p?valloc|calm_.*|operator new.*";

#define OUT_BYTES        8192
#define MESSAGE_BYTES    1024
#define MAX_NUMBER_BYTES 11 /* in these messages: a tag of one byte, then 7 bits in each byte */

/* A message of numbers, which is a part of the profile's message. */
struct message {
    size_t length;
    unsigned char bytes[MESSAGE_BYTES];
};
_Static_assert((MAX_SAMPLE_DEPTH + 8) * MAX_NUMBER_BYTES <= MESSAGE_BYTES, "a sample is the longest");

/* A profile that is being written, in an address range of its own. */
struct pprof {
    int descriptor;
    int error; /* the first errno of a write; everything after it is dropped */
    size_t length;
    unsigned char bytes[OUT_BYTES];
    size_t strings; /* written so far */
    struct mappings mappings;
    size_t slots;        /* a power of two, at least twice the number of addresses */
    uintptr_t written[]; /* the addresses whose locations are written: a hash table with open addressing */
};

static void pprof_flush(struct pprof *pprof) {
    if (pprof->error == 0) {
        pprof->error = file_write(pprof->descriptor, pprof->bytes, pprof->length);
    }
    pprof->length = 0;
}

/* `length` is at most OUT_BYTES. */
static void write_bytes(struct pprof *pprof, const void *bytes, size_t length) {
    if (OUT_BYTES - pprof->length < length) {
        pprof_flush(pprof);
    }
    memcpy(pprof->bytes + pprof->length, bytes, length);
    pprof->length += length;
}

enum { WIRE_NUMBER = 0, WIRE_BYTES = 2 };

static void message_add(struct message *message, unsigned field, unsigned wire, uint64_t number) {
    message->bytes[message->length++] = (unsigned char)(field << 3 | wire);
    for (; number >= 0x80; number >>= 7) {
        message->bytes[message->length++] = (unsigned char)(number | 0x80);
    }
    message->bytes[message->length++] = (unsigned char)number;
}

static void add_number(struct message *message, unsigned field, uint64_t number) {
    message_add(message, field, WIRE_NUMBER, number);
}

static void write_field(struct pprof *pprof, unsigned field, const void *bytes, size_t length) {
    struct message head = {0};
    message_add(&head, field, WIRE_BYTES, length);
    write_bytes(pprof, head.bytes, head.length);
    write_bytes(pprof, bytes, length);
}

static void write_message(struct pprof *pprof, unsigned field, const struct message *message) {
    write_field(pprof, field, message->bytes, message->length);
}

/* Returns the string's number. */
static uint64_t write_string(struct pprof *pprof, const char *string) {
    write_field(pprof, PROFILE_STRING, string, strlen(string));
    return pprof->strings++;
}

static void write_type(struct pprof *pprof, unsigned field, const char *type, const char *unit) {
    struct message message = {0};
    add_number(&message, TYPE_TYPE, write_string(pprof, type));
    add_number(&message, TYPE_UNIT, write_string(pprof, unit));
    write_message(pprof, field, &message);
}

static void write_head(struct pprof *pprof, uint64_t mean_bytes, uint64_t dropped) {
    static const char *const types[][2] = {
        {"alloc_objects", "count"},        {"alloc_space", "bytes"},     {"inuse_objects", "count"},
        {"inuse_space", "bytes"},          {"peak_objects", "count"},    {"peak_space", "bytes"},
        {"freed_lifetime", "nanoseconds"}, {"inuse_age", "nanoseconds"},
    };
    write_string(pprof, ""); /* string number 0 is empty by definition */
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++) {
        write_type(pprof, PROFILE_SAMPLE_TYPE, types[i][0], types[i][1]);
    }
    write_type(pprof, PROFILE_PERIOD_TYPE, "space", "bytes");
    struct message numbers = {0};
    add_number(&numbers, PROFILE_PERIOD, mean_bytes);
    add_number(&numbers, PROFILE_TIME_NS, clock_read_ns(CLOCK_REALTIME));
    add_number(&numbers, PROFILE_DEFAULT_TYPE, write_string(pprof, "inuse_space"));
    if (!unwind_hides_itself()) {
        add_number(&numbers, PROFILE_DROP_FRAMES, write_string(pprof, own_frames));
    }
    if (dropped > 0) {
        struct text comment = {0};
        text_format(&comment, "calmalloc: %lu samples dropped for want of room", dropped);
        add_number(&numbers, PROFILE_COMMENT, write_string(pprof, comment.bytes));
    }
    write_bytes(pprof, numbers.bytes, numbers.length);
}

static void take_name(void *context, const char *name) {
    write_string(context, name);
}

static void write_mappings(struct pprof *pprof) {
    size_t first_name = pprof->strings;
    mappings_read(&pprof->mappings, take_name, pprof);
    for (size_t i = 0; i < pprof->mappings.count; i++) {
        const struct mapping *mapping = &pprof->mappings.of[i];
        struct message message = {0};
        add_number(&message, MAPPING_ID, i + 1);
        add_number(&message, MAPPING_START, mapping->start);
        add_number(&message, MAPPING_LIMIT, mapping->limit);
        add_number(&message, MAPPING_OFFSET, mapping->offset);
        add_number(&message, MAPPING_FILE, first_name + i);
        if (mapping->build_id_bytes > 0) {
            char digits[2 * MAX_BUILD_ID_BYTES + 1] = "";
            for (size_t byte = 0; byte < mapping->build_id_bytes; byte++) {
                digits[2 * byte] = "0123456789abcdef"[mapping->build_id[byte] >> 4];
                digits[2 * byte + 1] = "0123456789abcdef"[mapping->build_id[byte] & 15];
            }
            add_number(&message, MAPPING_BUILD_ID, write_string(pprof, digits));
        }
        write_message(pprof, PROFILE_MAPPING, &message);
    }
}

/* Writes the location of a return address, unless it is written already. The
 * location's number is the return address. The call is before that address. */
static void write_location(struct pprof *pprof, uintptr_t address) {
    size_t slot = random_mix(address) & (pprof->slots - 1);
    for (; pprof->written[slot] != 0; slot = (slot + 1) & (pprof->slots - 1)) {
        if (pprof->written[slot] == address) {
            return;
        }
    }
    pprof->written[slot] = address;
    struct message message = {0};
    add_number(&message, LOCATION_ID, address);
    const struct mapping *mapping = mappings_find(&pprof->mappings, address - 1);
    if (mapping != NULL) {
        add_number(&message, LOCATION_MAPPING, (uint64_t)(mapping - pprof->mappings.of) + 1);
    }
    add_number(&message, LOCATION_ADDRESS, address - 1);
    write_message(pprof, PROFILE_LOCATION, &message);
}

static void add_weight(struct message *message, struct sample_weight weight) {
    add_number(message, SAMPLE_VALUE, (weight.count + SAMPLE_COUNT_UNIT / 2) / SAMPLE_COUNT_UNIT);
    add_number(message, SAMPLE_VALUE, weight.bytes);
}

/* Writes the values in the order of write_head's types. */
static void write_sample(struct pprof *pprof, struct samples *samples, size_t stack, uint64_t now_ns) {
    const uintptr_t *addresses;
    size_t depth;
    struct sample_sums sums = samples_read(samples, stack, now_ns, &addresses, &depth);
    struct message message = {0};
    for (size_t i = 0; i < depth; i++) {
        write_location(pprof, addresses[i]);
        add_number(&message, SAMPLE_LOCATION, addresses[i]);
    }
    add_weight(&message, sums.allocated);
    add_weight(&message, sums.in_use);
    add_weight(&message, sums.at_peak);
    add_number(&message, SAMPLE_VALUE, sums.lifetime_ns);
    add_number(&message, SAMPLE_VALUE, sums.age_ns);
    write_message(pprof, PROFILE_SAMPLE, &message);
}

int pprof_write(struct samples *samples, uint64_t mean_bytes, const char *path, bool is_new) {
    size_t addresses;
    size_t stacks = samples_count(samples, &addresses);
    size_t slots = 2;
    while (slots < 2 * addresses) {
        slots *= 2;
    }
    size_t bytes = sizeof(struct pprof) + slots * sizeof(uintptr_t);
    struct pprof *pprof = vm_map(bytes);
    if (pprof == NULL) {
        return ENOMEM;
    }
    pprof->slots = slots;
    int flags = O_WRONLY | O_CREAT | O_CLOEXEC | (is_new ? O_EXCL | O_NOFOLLOW : O_TRUNC);
    pprof->descriptor = (int)os_syscall(SYS_openat, AT_FDCWD, path, flags, 0666);
    int error = -pprof->descriptor;
    if (error <= 0) {
        write_head(pprof, mean_bytes, atomic_load_explicit(&samples->dropped, memory_order_relaxed));
        write_mappings(pprof);
        uint64_t now_ns = clock_now_ns();
        for (size_t stack = 1; stack <= stacks; stack++) {
            write_sample(pprof, samples, stack, now_ns);
        }
        pprof_flush(pprof);
        long closed = os_syscall(SYS_close, pprof->descriptor);
        error = pprof->error != 0 ? pprof->error : (int)-closed;
        if (error != 0 && is_new) {
            os_syscall(SYS_unlinkat, AT_FDCWD, path, 0);
        }
    }
    vm_release(pprof, bytes);
    return error;
}
