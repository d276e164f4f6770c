#include "colored/page_mover.h"

#include "base/assert.h"
#include "os/mman.h"
#include "os/syscall.h"
#include "os/vm.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/ioctl.h>

/* The kernel answers EAGAIN while it handles the page itself. */
#define MAX_MOVE_TRIES 64

/* ---- userfaultfd ---- */

/* The kernel's interface, under the kernel's names: older headers lack UFFDIO_MOVE. */
#define UFFD_USER_MODE_ONLY          1
#define UFFD_API                     0xAA
#define UFFD_FEATURE_MOVE            (1 << 16)
#define UFFDIO_REGISTER_MODE_MISSING 1
#define UFFDIO_API                   _IOWR(0xAA, 0x3F, uint64_t[3]) /* API, features, requests (answer) */
#define UFFDIO_REGISTER              _IOWR(0xAA, 0x00, uint64_t[4]) /* start, bytes, mode, requests (answer) */
#define UFFDIO_MOVE                  _IOWR(0xAA, 0x05, uint64_t[5]) /* to, from, bytes, mode, moved (answer) */

static long page_mover_control(int descriptor, unsigned long request, uint64_t *arguments) {
    return os_syscall(SYS_ioctl, descriptor, request, arguments);
}

void page_mover_open(struct page_mover *mover, void *base, size_t bytes) {
    mover->mappings = 0;
    /* Limited to faults of user mode, it needs no privilege. */
    mover->descriptor = (int)os_syscall(SYS_userfaultfd, O_CLOEXEC | UFFD_USER_MODE_ONLY);
    uint64_t api[3] = {UFFD_API, UFFD_FEATURE_MOVE};
    uint64_t range[4] = {(uintptr_t)base, bytes, UFFDIO_REGISTER_MODE_MISSING};
    if (mover->descriptor < 0 || page_mover_control(mover->descriptor, UFFDIO_API, api) != 0 ||
        page_mover_control(mover->descriptor, UFFDIO_REGISTER, range) != 0) {
        page_mover_close(mover);
    }
}

void page_mover_close(struct page_mover *mover) {
    if (mover->descriptor >= 0) {
        os_syscall(SYS_close, mover->descriptor);
    }
    mover->descriptor = -1;
}

static bool move_by_userfaultfd(const struct page_mover *mover, void *from, void *to) {
    for (int tries = 0; mover->descriptor >= 0 && tries < MAX_MOVE_TRIES; tries++) {
        uint64_t move[5] = {(uintptr_t)to, (uintptr_t)from, vm_page_size()};
        long result = page_mover_control(mover->descriptor, UFFDIO_MOVE, move);
        if (result != -EAGAIN) {
            return result == 0;
        }
    }
    return false;
}

/* ---- mremap ---- */

static _Atomic(size_t) mappings_in_use;

static bool claim_mapping(void) {
    bool is_free = atomic_fetch_add_explicit(&mappings_in_use, 1, memory_order_relaxed) < MAX_PAGE_MAPPINGS;
    if (!is_free) {
        page_mappings_return(1);
    }
    return is_free;
}

void page_mappings_return(size_t mappings) {
    calm_assert(atomic_load_explicit(&mappings_in_use, memory_order_relaxed) >= mappings, mappings);
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
    /* MREMAP_DONTUNMAP: another thread's mapping could take the address that the page leaves. */
    size_t page_bytes = vm_page_size();
    long result = os_syscall(SYS_mremap, from, page_bytes, page_bytes,
                             MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, to);
    if (result != (long)to) {
        page_mappings_return(1);
        return result == -ENOMEM ? ENOMEM : ENOTSUP;
    }
    mover->mappings++;
    return 0;
}
