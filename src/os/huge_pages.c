#include "os/huge_pages.h"

#include "os/file.h"

#include <stdbool.h>
#include <string.h>

#define DIRECTORY "/sys/kernel/mm/transparent_hugepage/"

static bool is_chosen(const char *word) {
    char text[64];
    return file_read(DIRECTORY "enabled", text, sizeof text) > 0 && strstr(text, word) != NULL;
}

/* What a huge page is, or 0. */
static size_t huge_page_bytes(void) {
    char text[64];
    if (file_read(DIRECTORY "hpage_pmd_size", text, sizeof text) <= 0) {
        return 0;
    }
    size_t bytes = 0;
    for (const char *digit = text; *digit >= '0' && *digit <= '9'; digit++) {
        bytes = bytes * 10 + (size_t)(*digit - '0');
    }
    return (bytes & (bytes - 1)) == 0 ? bytes : 0;
}

size_t huge_page_always_bytes(void) {
    return is_chosen("[always]") ? huge_page_bytes() : 0;
}

size_t huge_page_request_bytes(void) {
    return is_chosen("[always]") || is_chosen("[madvise]") ? huge_page_bytes() : 0;
}
