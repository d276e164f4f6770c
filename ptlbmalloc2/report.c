#include "report.h"

#include <errno.h>
#include <fcntl.h>
#include <gnu/libc-version.h>
#include <string.h>
#include <unistd.h>

#include "activation.h"
#include "base/size.h"
#include "calmalloc.h"
#include "glibc_settings.h"
#include "options.h"
#include "os/control.h"
#include "os/counter_table.h"
#include "os/process.h"
#include "os/purge.h"
#include "os/text.h"
#include "placement.h"
#include "state.h"

void report_start(void) {
    bool on = activation_is_on();
    text_write_line(STDERR_FILENO, "ptlbmalloc2: glibc %s %s%s", gnu_get_libc_version(),
                    on ? "is governed" : "is left as it is: ", on ? "" : activation_why_not);
    if (options.placement) {
        text_write_line(STDERR_FILENO, "ptlbmalloc2: mapped blocks are %s%s",
                        placement_is_on() ? "placed" : "not placed: ", placement_why_not);
    }
}

/* One object of JSON, or a line for each value. */
struct report {
    struct text text;
    bool json;
};

/* Begins the next value. The name is the key in JSON, and a label in text. */
static struct text *key(struct report *report, const char *name) {
    struct text *text = &report->text;
    if (report->json) {
        text_format(text, "%s\"%s\": ", text->length == 0 ? "{" : ", ", name);
    } else {
        static const char blanks[] = "                        "; /* up to the values' column */
        const char *begin = text->length == 0 ? "ptlbmalloc2: statistics at exit" : "";
        text_format(text, "%s\nptlbmalloc2:   %s%s", begin, name,
                    blanks + size_min(strlen(name), sizeof blanks - 1));
    }
    return text;
}

static void put_string(struct report *report, const char *name, const char *value) {
    struct text *text = key(report, name);
    if (report->json) {
        text_json_string(text, value);
    } else {
        text_format(text, "%s", value);
    }
}

static void put_bool(struct report *report, const char *name, bool value) {
    text_format(key(report, name), "%s", value ? "true" : "false");
}

static void put_number(struct report *report, const char *name, uint64_t value) {
    text_format(key(report, name), "%lu", value);
}

static void put_all(struct report *report) {
    static const char *const methods[] = {[PURGE_UNKNOWN] = "none yet",
                                          [PURGE_VECTORED] = "process_madvise",
                                          [PURGE_SINGLE] = "madvise",
                                          [PURGE_IMPOSSIBLE] = "none works"};
    struct counters *counters = &state.counters;
    struct process process = process_now();
    put_number(report, "pid", process.number);
    put_number(report, "ppid", process.parent);
    put_number(report, "started_ns", process.started_ns);
    put_bool(report, "active", activation_is_on());
    put_string(report, "why_not", activation_is_on() ? "" : activation_why_not);
    put_string(report, "glibc", gnu_get_libc_version());
    text_hundredths(key(report, "sensitivity"), (uint64_t)(options.sensitivity * 100));
    put_bool(report, "user_trim_threshold", LOAD(&glibc_settings.trim_threshold));
    put_bool(report, "user_top_pad", LOAD(&glibc_settings.top_pad));
    put_bool(report, "user_mmap_threshold", LOAD(&glibc_settings.mmap_threshold));
#define X(name) put_number(report, #name, state_sum(&counters->name));
    COUNTERS(X)
#undef X
    text_hundredths(key(report, "cpus"), counters->cpus_hundredths);
    text_hundredths(key(report, "ranges_per_trim"),
                    counters->trims > 0 ? counters->ranges * 100 / counters->trims : 0);
    put_string(report, "purge_method", methods[purge_current_method()]);
    put_number(report, "purge_calls", counters->process_madvise_calls + counters->madvise_calls);
    put_bool(report, "placement", placement_is_on());
    put_string(report, "why_no_placement", placement_why_not);
}

static const char *why_not_opened(int error) {
    return error == EACCES  ? " (permission denied)"
           : error == ELOOP ? " (a symbolic link)"
           : error == ENXIO ? " (a pipe without a reader)"
                            : "";
}

void report_stats(void) {
    if (options.stats_format == STATS_OFF) {
        return;
    }
    struct report report = {.json = options.stats_format == STATS_JSON};
    put_all(&report);
    text_format(&report.text, report.json ? "}\n" : "\n");
    if (options.stats_path[0] == '\0') {
        text_write(&report.text, STDERR_FILENO);
        return;
    }
    /* A line of each process is appended. Who may write to the folder must not choose another file by a link,
     * nor have the program wait at its end for a reader of a pipe. */
    int flags = O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY;
    int descriptor = open(options.stats_path, flags, 0666);
    if (descriptor < 0) {
        text_write_line(STDERR_FILENO, "ptlbmalloc2: statistics not written: cannot open %s%s",
                        options.stats_path, why_not_opened(errno));
        return;
    }
    fcntl(descriptor, F_SETFL, O_APPEND); /* a reader that is there is waited for */
    text_write(&report.text, descriptor);
    close(descriptor);
}

/* Whether glibc is governed, and the counters. */
#define TERM(label, place) \
    { .name = (label), .at = &(place), .bytes = sizeof(place) }
#define COUNTER_TERM(counter) TERM(#counter, state.counters.counter),

static const struct counter_term terms[] = {TERM("state", activation), PUBLISHED_COUNTERS(COUNTER_TERM)};

__attribute__((used, visibility("hidden"))) const struct counter_table ptlbmalloc2_counter_table =
    COUNTER_TABLE("ptlbmalloc2", terms, .release = CALM_RELEASE, .control = &os_control);
COUNTER_TABLE_NOTE(ptlbmalloc2_counter_table);
