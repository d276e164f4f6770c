#include "api/report.h"

#include "api/counters.h"
#include "api/options.h"
#include "os/process.h"
#include "os/syscall.h"

#include <fcntl.h>
#include <sys/stat.h>

void report_json(struct text *text) {
    struct process process = process_now();
    text_format(text, "{\"allocator\": \"calmalloc\", \"version\": %u", CALM_STATS_VERSION);
    text_format(text, ", \"pid\": %u, \"ppid\": %u, \"started_ns\": %lu", process.number, process.parent,
                process.started_ns);
    counters_print(text, ", \"%s\": %lu");
    text_format(text, ", \"options\": {");
    const char *separator = "";
    for (enum option which = 0; which < OPTION_COUNT; which++) {
        struct text value = {0};
        if (!options_is_reported(which)) {
            continue;
        }
        bool is_number = options_print(which, &value);
        text_format(text, "%s\"%s\": %s", separator, options_name(which), is_number ? value.bytes : "");
        separator = ", ";
        if (!is_number) {
            text_json_string(text, value.bytes);
        }
    }
    text_format(text, "}}");
}

/* A program may close stderr before the last destructors run. The report has a
 * descriptor of its own, unless the program closed this one, too, and uses its
 * number again. */
static int report_descriptor = -1;
static struct stat report_file;

static bool is_report_file(int descriptor) {
    struct stat file = {0};
    return os_syscall(SYS_fstat, descriptor, &file) == 0 && file.st_dev == report_file.st_dev &&
           file.st_ino == report_file.st_ino;
}

void report_prepare(void) {
    if (calm_options.report == OPTION_REPORT_EXIT && report_descriptor < 0 &&
        os_syscall(SYS_fstat, 2, &report_file) == 0) {
        long copy = os_syscall(SYS_fcntl, 2, F_DUPFD_CLOEXEC, 64);
        report_descriptor = copy >= 0 ? (int)copy : 2;
    }
}

void report_write(void) {
    if (calm_options.report == OPTION_REPORT_EXIT && report_descriptor >= 0 &&
        is_report_file(report_descriptor)) {
        struct text line = {0};
        report_json(&line);
        text_format(&line, "\n");
        text_write(&line, report_descriptor);
    }
}
