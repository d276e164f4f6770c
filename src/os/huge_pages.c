#include "os/huge_pages.h"

#include "os/file.h"

#include <stdbool.h>
#include <string.h>

#define DIRECTORY "/sys/kernel/mm/transparent_hugepage/"

static bool is_chosen(const char *word) {
    char text[64];
    return file_read(DIRECTORY "enabled", text, sizeof text) > 0 && strstr(text, word) != NULL;
}

static size_t huge_page_bytes(void) {
    uint64_t bytes = file_read_number(DIRECTORY "hpage_pmd_size"); /* UINT64_MAX if there is none */
    return (bytes & (bytes - 1)) == 0 ? bytes : 0;
}

size_t huge_pages_always_bytes(void) {
    return is_chosen("[always]") ? huge_page_bytes() : 0;
}

size_t huge_pages_request_bytes(void) {
    return is_chosen("[always]") || is_chosen("[madvise]") ? huge_page_bytes() : 0;
}
