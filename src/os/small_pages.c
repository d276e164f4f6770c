#include "os/small_pages.h"

#include "os/address_space.h"
#include "os/file.h"
#include "os/mman.h"
#include "os/syscall.h"
#include "os/text.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/ioctl.h>

/* The kernel asks to try again while it looks at the page itself. */
#define TRIES_MOST 64

bool small_pages_commit(void *base, size_t bytes) {
    /* EINVAL: a kernel without huge pages. */
    os_syscall(SYS_madvise, (long)base, (long)bytes, MADV_NOHUGEPAGE, 0, 0, 0);
    return os_commit(base, bytes);
}

bool small_pages_populate(void *base, size_t bytes) {
    long result;
    do {
        result = os_syscall(SYS_madvise, (long)base, (long)bytes, MADV_POPULATE_WRITE, 0, 0, 0);
    } while (result == -EINTR || result == -EAGAIN);
    if (result == -EINVAL) { /* before Linux 5.14 */
        size_t page_bytes = os_page_size();
        for (size_t at = 0; at < bytes; at += page_bytes) {
            *((volatile char *)base + at) = 0;
        }
        return true;
    }
    return result == 0;
}

size_t small_pages_available(const char *root) {
    static const char field[] = "MemAvailable:";
    char text[1024];
    struct text path;
    path.length = 0;
    text_string(&path, root);
    text_string(&path, "/proc/meminfo");
    if (!text_end(&path)) {
        return SIZE_MAX;
    }
    const char *at = file_read(path.bytes, text, sizeof text) > 0 ? strstr(text, field) : NULL;
    if (at == NULL) {
        return SIZE_MAX;
    }
    size_t kib = 0;
    for (at += sizeof field - 1; *at == ' '; at++) {
    }
    for (; *at >= '0' && *at <= '9'; at++) {
        kib = kib * 10 + (size_t)(*at - '0');
    }
    return kib << 10;
}

/* ---- userfaultfd ---- */

/* The kernel's interface, by its own names; headers older than the kernel lack the last part. */
#define UFFD_USER_MODE_ONLY          1
#define UFFD_API                     ((uint64_t)0xAA)
#define UFFD_FEATURE_MOVE            ((uint64_t)1 << 16)
#define UFFDIO_REGISTER_MODE_MISSING ((uint64_t)1)

struct uffdio_api {
    uint64_t api;
    uint64_t features;
    uint64_t ioctls;
};

struct uffdio_register {
    uint64_t start;
    uint64_t bytes;
    uint64_t mode;
    uint64_t ioctls;
};

struct uffdio_move {
    uint64_t to;
    uint64_t from;
    uint64_t bytes;
    uint64_t mode;
    int64_t moved;
};

#define UFFDIO_API      _IOWR(0xAA, 0x3F, struct uffdio_api)
#define UFFDIO_REGISTER _IOWR(0xAA, 0x00, struct uffdio_register)
#define UFFDIO_MOVE     _IOWR(0xAA, 0x05, struct uffdio_move)

static long control(int descriptor, unsigned long request, void *argument) {
    return os_syscall(SYS_ioctl, descriptor, (long)request, (long)argument, 0, 0, 0);
}

void page_mover_open(struct page_mover *mover, void *base, size_t bytes) {
    mover->mappings = 0;
    /* Of user mode only: what needs no privilege. */
    mover->descriptor = (int)os_syscall(SYS_userfaultfd, O_CLOEXEC | UFFD_USER_MODE_ONLY, 0, 0, 0, 0, 0);
    struct uffdio_api api = {.api = UFFD_API, .features = UFFD_FEATURE_MOVE};
    struct uffdio_register range = {
        .start = (uintptr_t)base, .bytes = bytes, .mode = UFFDIO_REGISTER_MODE_MISSING};
    if (mover->descriptor < 0 || control(mover->descriptor, UFFDIO_API, &api) != 0 ||
        control(mover->descriptor, UFFDIO_REGISTER, &range) != 0) {
        page_mover_close(mover);
    }
}

void page_mover_close(struct page_mover *mover) {
    if (mover->descriptor >= 0) {
        os_syscall(SYS_close, mover->descriptor, 0, 0, 0, 0, 0);
    }
    mover->descriptor = -1;
}

static bool move_by_userfaultfd(const struct page_mover *mover, void *from, void *to) {
    for (int tries = 0; mover->descriptor >= 0 && tries < TRIES_MOST; tries++) {
        struct uffdio_move move = {.to = (uintptr_t)to, .from = (uintptr_t)from, .bytes = os_page_size()};
        long result = control(mover->descriptor, UFFDIO_MOVE, &move);
        if (result != -EAGAIN) {
            return result == 0;
        }
    }
    return false;
}

/* ---- mappings ---- */

static _Atomic(size_t) mappings_in_use;

static bool claim_mapping(void) {
    size_t in_use = atomic_load_explicit(&mappings_in_use, memory_order_relaxed);
    while (in_use < PAGE_MAPPINGS_MOST) {
        if (atomic_compare_exchange_weak_explicit(&mappings_in_use, &in_use, in_use + 1, memory_order_relaxed,
                                                  memory_order_relaxed)) {
            return true;
        }
    }
    return false;
}

void page_mappings_return(size_t mappings) {
    atomic_fetch_sub_explicit(&mappings_in_use, mappings, memory_order_relaxed);
}

void page_mappings_after_fork(size_t in_use) {
    atomic_store_explicit(&mappings_in_use, in_use, memory_order_relaxed);
}

int page_mover_move(struct page_mover *mover, void *from, void *to) {
    if (move_by_userfaultfd(mover, from, to)) {
        return 0;
    }
    if (!claim_mapping()) {
        return ENOMEM;
    }
    /* The address it leaves stays ours, so that nobody else's mapping comes to lie there. */
    size_t page_bytes = os_page_size();
    long result = os_syscall(SYS_mremap, (long)from, (long)page_bytes, (long)page_bytes,
                             MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, (long)to, 0);
    if (result != (long)to) {
        page_mappings_return(1);
        return result == -ENOMEM ? ENOMEM : ENOTSUP;
    }
    mover->mappings++;
    return 0;
}
