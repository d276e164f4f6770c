#include "colored/pagemap.h"

#include "os/file.h"
#include "os/syscall.h"
#include "os/text.h"
#include "os/vm.h"

#include <errno.h>
#include <stdbool.h>

#define PRESENT    ((uint64_t)1 << 63)
#define FRAME_MASK (((uint64_t)1 << 55) - 1)

/* Returns 0 if all of it was read, else an errno value. */
static int read_at(long descriptor, void *buffer, size_t bytes, uint64_t offset) {
    for (size_t done = 0; done < bytes;) {
        long length = os_syscall(SYS_pread64, descriptor, (char *)buffer + done, bytes - done, offset + done);
        if (length > 0) {
            done += (size_t)length;
        } else if (length != -EINTR) {
            return length == 0 ? EIO : (int)-length;
        }
    }
    return 0;
}

/* Converts the file's entries to frames in place. Hidden frames are all 0: EPERM. */
static int to_frames(uint64_t *entries, size_t pages) {
    bool seen = false;
    bool hidden = false;
    for (size_t i = 0; i < pages; i++) {
        uint64_t frame = entries[i] & FRAME_MASK;
        bool present = (entries[i] & PRESENT) != 0;
        seen |= present && frame != 0;
        hidden |= present && frame == 0;
        entries[i] = present ? frame : PAGEMAP_ABSENT;
    }
    return hidden && !seen ? EPERM : 0;
}

int pagemap_frames(const char *root, const void *start, size_t pages, uint64_t *frames) {
    char path[FILE_MAX_PATH];
    if (*text_print(path, sizeof path, "%s/proc/self/pagemap", root) == '\0') {
        return ENAMETOOLONG;
    }
    long descriptor = file_open(path);
    if (descriptor < 0) {
        return descriptor == -EACCES ? EPERM : (int)-descriptor;
    }
    uint64_t offset = (uintptr_t)start / vm_page_size() * sizeof *frames;
    int error = read_at(descriptor, frames, pages * sizeof *frames, offset);
    os_syscall(SYS_close, descriptor);
    return error != 0 ? error : to_frames(frames, pages);
}
