#include "os/huge_pages.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define DIRECTORY "/sys/kernel/mm/transparent_hugepage/"

/* Reads a short file as a string; empty if it cannot be read. */
static void read_file(const char *path, char *text, size_t size) {
    text[0] = '\0';
    int descriptor = open(path, O_RDONLY | O_CLOEXEC);
    if (descriptor < 0) {
        return;
    }
    ssize_t length = read(descriptor, text, size - 1);
    text[length > 0 ? length : 0] = '\0';
    close(descriptor);
}

size_t huge_page_always_bytes(void) {
    char text[64];
    int saved_errno = errno;
    size_t bytes = 0;
    read_file(DIRECTORY "enabled", text, sizeof text);
    if (strstr(text, "[always]") != NULL) {
        read_file(DIRECTORY "hpage_pmd_size", text, sizeof text);
        bytes = strtoul(text, NULL, 10);
    }
    errno = saved_errno;
    return (bytes & (bytes - 1)) == 0 ? bytes : 0;
}
