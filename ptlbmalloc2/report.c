#include "report.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "os/purge.h"
#include "os/text.h"
#include "placement.h"

static void report_placement(void) {
    struct text line = {0};
    const char *why_not = placement_why_not();
    text_string(&line, "ptlbmalloc2: mapped blocks are ");
    text_string(&line, why_not == NULL ? "placed" : "not placed: ");
    text_string(&line, why_not == NULL ? "" : why_not);
    text_string(&line, "\n");
    text_write(&line, STDERR_FILENO);
}

void report_start(const struct governor_stats *stats, const struct options *options) {
    struct text line = {0};
    text_string(&line, "ptlbmalloc2: glibc ");
    text_string(&line, stats->glibc_version);
    if (stats->active) {
        text_string(&line, " is governed\n");
    } else {
        text_string(&line, " is left as it is: ");
        text_string(&line, stats->why_not);
        text_string(&line, "\n");
    }
    text_write(&line, STDERR_FILENO);
    if (options->placement) {
        report_placement();
    }
}

static const char *method_name(void) {
    switch (purge_current_method()) {
    case PURGE_VECTORED:
        return "process_madvise";
    case PURGE_SINGLE:
        return "madvise";
    case PURGE_UNKNOWN:
        break;
    }
    return "none yet";
}

/* One value of the report: the name is the key in JSON and, with its underscores, the label in text. */
static void put_name(struct text *text, const char *name, bool json) {
    if (json) {
        text_string(text, text->length == 0 ? "{" : ", ");
        text_json_string(text, name);
        text_string(text, ": ");
    } else {
        text_string(text, "ptlbmalloc2:   ");
        text_string(text, name);
        for (size_t column = strlen(name); column < 24; column++) {
            text_string(text, " ");
        }
    }
}

static void put_string(struct text *text, const char *name, const char *value, bool json) {
    put_name(text, name, json);
    if (json) {
        text_json_string(text, value);
    } else {
        text_string(text, value);
        text_string(text, "\n");
    }
}

static void put_bool(struct text *text, const char *name, bool value, bool json) {
    put_name(text, name, json);
    text_string(text, value ? "true" : "false");
    text_string(text, json ? "" : "\n");
}

static void put_number(struct text *text, const char *name, uint64_t value, bool json) {
    put_name(text, name, json);
    text_number(text, value);
    text_string(text, json ? "" : "\n");
}

static void put_hundredths(struct text *text, const char *name, uint64_t value, bool json) {
    put_name(text, name, json);
    text_hundredths(text, value);
    text_string(text, json ? "" : "\n");
}

static void put_all(struct text *text, const struct governor_stats *stats, bool json) {
    put_number(text, "pid", (uint64_t)getpid(), json);
    put_bool(text, "active", stats->active, json);
    put_string(text, "why_not", stats->active ? "" : stats->why_not, json);
    put_string(text, "glibc", stats->glibc_version, json);
    put_hundredths(text, "sensitivity", (uint64_t)(stats->sensitivity * 100), json);
    put_bool(text, "user_trim_threshold", stats->user_trim_threshold, json);
    put_bool(text, "user_top_pad", stats->user_top_pad, json);
    put_bool(text, "user_mmap_threshold", stats->user_mmap_threshold, json);
    put_number(text, "threshold_bytes", stats->threshold_bytes, json);
    put_number(text, "pad_each_bytes", stats->pad_each_bytes, json);
    put_number(text, "footprint_bytes", stats->footprint_bytes, json);
    put_number(text, "free_top_bytes", stats->free_top_bytes, json);
    put_number(text, "arenas", stats->arenas, json);
    put_hundredths(text, "cpus", stats->cpus_hundredths, json);
    put_number(text, "trims", stats->trims, json);
    put_number(text, "bytes_trimmed", stats->bytes_trimmed, json);
    put_number(text, "bytes_purged", stats->bytes_purged, json);
    put_number(text, "ranges", stats->ranges, json);
    put_hundredths(text, "ranges_per_trim", stats->trims > 0 ? stats->ranges * 100 / stats->trims : 0, json);
    put_string(text, "purge_method", method_name(), json);
    put_number(text, "purge_calls", stats->purge_calls, json);
    put_number(text, "process_madvise_calls", stats->vectored_calls, json);
    put_number(text, "break_calls", stats->break_calls, json);
    put_number(text, "failed_purges", stats->failed_purges, json);
    put_number(text, "busy_arenas", stats->busy_arenas, json);
    put_number(text, "walks", stats->walks, json);
    put_number(text, "claims", stats->claims, json);
    put_number(text, "bytes_claimed", stats->bytes_claimed, json);
    put_number(text, "threshold_changes", stats->threshold_changes, json);
    put_number(text, "mmap_threshold_raises", stats->mmap_threshold_raises, json);
    put_bool(text, "placement", placement_is_on(), json);
    put_string(text, "why_no_placement", placement_is_on() ? "" : placement_why_not(), json);
    put_number(text, "placed_blocks", stats->placed_blocks, json);
}

void report_stats(const struct governor_stats *stats, const struct options *options) {
    if (options->stats_format == STATS_OFF) {
        return;
    }
    bool json = options->stats_format == STATS_JSON;
    struct text text = {0};
    if (!json) {
        struct text head = {0};
        text_string(&head, "ptlbmalloc2: statistics at exit\n");
        text_write(&head, STDERR_FILENO);
    }
    put_all(&text, stats, json);
    text_string(&text, json ? "}\n" : "");

    int descriptor = STDERR_FILENO;
    if (options->stats_path[0] != '\0') {
        descriptor = open(options->stats_path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
        if (descriptor < 0) {
            struct text line = {0};
            text_string(&line, "ptlbmalloc2: statistics not written: cannot open ");
            text_string(&line, options->stats_path);
            text_string(&line, errno == EACCES ? " (permission denied)\n" : "\n");
            text_write(&line, STDERR_FILENO);
            return;
        }
    }
    text_write(&text, descriptor);
    if (descriptor != STDERR_FILENO) {
        close(descriptor);
    }
}
