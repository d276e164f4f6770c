#include "api/options.h"

#include "api/profiling.h"
#include "api/state.h"
#include "api/statistics.h"
#include "os/file.h"
#include "os/purge.h"
#include "os/text.h"
#include "profile/unwind.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <unistd.h>

enum change {
    CHANGE_ANY_TIME,
    CHANGE_AT_START, /* before the first block */
};

struct option {
    const char *name;
    const char
        *words; /* "first|second" for values 0 and 1; NULL: a number; TEXT: at most `most` bytes of text */
    int least;
    int most;
    enum change change;
    _Atomic(int) *value;
    const char *help;
};

static _Atomic(int) cache;
static _Atomic(int) misuse;
static _Atomic(int) report;
static _Atomic(int) vectored = 1; /* auto */
static _Atomic(int) offload;
static _Atomic(int) offload_cpu;
static _Atomic(int) offload_patience = 10;
static _Atomic(int) profile;
static _Atomic(int) profile_file;

/* Marks options that take any text without '|' and ','. */
#define TEXT            "TEXT"
#define TEXT_BYTES_MOST 1000
static char profile_file_text[TEXT_BYTES_MOST + 1];

#define SETTINGS calm_governor.settings

/*
 * Name, values, range, when it may change, variable, and help text. scripts/options generates the table in
 * docs/allocator.md from this one.
 */
static const struct option options[] = {
    {"policy", "adaptive|paper", 0, 1, CHANGE_ANY_TIME, &SETTINGS.policy,
     "The limit on free memory. `paper`: the threshold of table 1 of the paper. `adaptive`: that threshold, "
     "and "
     "the memory that was in use recently, for as long as purging it would cost more than `purge_time`."},
    {"slack", NULL, 1, 10000, CHANGE_ANY_TIME, &SETTINGS.slack,
     "Scales the policy's threshold, in per cent."},
    {"purge_time", NULL, 0, 100, CHANGE_ANY_TIME, &SETTINGS.purge_time,
     "Per cent of CPU time that purging memory may cost if the memory is needed again soon. At a higher "
     "cost, the "
     "adaptive policy keeps free memory for longer. 0: keep it for the longest period, 12.8 s."},
    {"background", "off|on", 0, 1, CHANGE_ANY_TIME, &SETTINGS.background,
     "Whether a helper thread purges unused memory, even while the program is idle. It starts once the "
     "program "
     "has several threads or keeps much free memory."},
    {"cgroup", "off|on", 0, 1, CHANGE_ANY_TIME, &SETTINGS.watch_cgroup,
     "Whether to keep less free memory when the control group (version 1 or 2) or the machine is short of "
     "memory."},
    {"huge_pages", "never|earned", 0, 1, CHANGE_ANY_TIME, &SETTINGS.huge_pages,
     "Whether to request huge pages for large blocks once the program has been seen to touch all of its "
     "large "
     "blocks."},
    {"placement", "off|lines|colors|random", 0, 3, CHANGE_ANY_TIME, &SETTINGS.placement,
     "The offset at which a large block starts. `lines`: successive blocks start at evenly spread cache "
     "lines of "
     "their first page. `colors`: that, and in huge pages no color of an outer cache gets more blocks than "
     "it has "
     "room for. `random`: a random cache line of the first page. `off`: the start of a page. See "
     "placement.md."},
    {"populate", "never|calloc", 0, 1, CHANGE_ANY_TIME, &SETTINGS.populate,
     "Whether `calloc` makes large blocks resident at once, if they are small relative to the memory in use. "
     "Otherwise each page that is read before it is written costs a shootdown."},
    {"vectored_purge", "off|auto|on", 0, 2, CHANGE_ANY_TIME, &vectored,
     "Whether to purge many ranges by one `process_madvise`, where the kernel allows it. `auto`: unless the "
     "process has a seccomp filter, which might kill it for the call. `on`: unless the program adds a "
     "filter."},
    {"cache", "auto|locked|off", 0, 2, CHANGE_AT_START, &cache,
     "How the CPU caches are synchronized. `auto`: by restartable sequences where available, otherwise by "
     "locks. "
     "`locked`: by locks. `off`: no caches."},
    {"offload", "off|on|sync", 0, 2, CHANGE_AT_START, &offload,
     "Whether a server thread on a CPU of its own does all work on the heap (see offload.md). `sync`: by one "
     "message for each call, for comparison."},
    {"offload_cpu", "auto|sibling|core|socket", 0, 8191, CHANGE_AT_START, &offload_cpu,
     "The server's CPU. `auto`: an idle one. `sibling`, `core`, `socket`: relative to the CPU of the busiest "
     "thread, another hardware thread of its core, another core of its socket, or another socket. A number: "
     "that "
     "CPU, reserved for the server whatever else runs there; the heap never switches to shared mode."},
    {"offload_patience", NULL, 1, 3600000, CHANGE_AT_START, &offload_patience,
     "Milliseconds that a thread waits for the server before it uses a second heap."},
    {"misuse", "abort|warn", 0, 1, CHANGE_ANY_TIME, &misuse,
     "What to do after reporting a double or invalid free."},
    {"report", "off|exit", 0, 1, CHANGE_ANY_TIME, &report,
     "Whether to write the counters to stderr at exit, as one line of JSON."},
    {"profile", NULL, 0, 1073741824, CHANGE_ANY_TIME, &profile,
     "Average number of bytes between two samples of the heap profile; `k`, `m` and `g` may follow. 0: no "
     "profile. "
     "See profiling.md."},
    {"profile_file", "TEXT", 0, 1000, CHANGE_AT_START, &profile_file,
     "Prefix of the name of the profile written at exit, before `.PID.heap`; `calmalloc` if empty."},
};

#define OPTION_COUNT (sizeof options / sizeof options[0])

int options_cache(void) {
    return cache;
}

int options_misuse(void) {
    return misuse;
}

int options_report(void) {
    return report;
}

int options_offload(void) {
    return offload;
}

int options_offload_cpu(void) {
    return offload_cpu;
}

int options_offload_patience(void) {
    return offload_patience;
}

int options_profile(void) {
    return profile;
}

const char *options_profile_file(void) {
    return profile_file_text;
}

static bool is_text(const struct option *option) {
    return option->words != NULL && strcmp(option->words, TEXT) == 0;
}

static bool is_bytes(const struct option *option) {
    return option->value == &profile;
}

/* Takes words and numbers. Numbers are stored after the last word's. */
static bool takes_cpu(const struct option *option) {
    return option->value == &offload_cpu;
}

/* The index of a word in "first|second|...", or -1. */
static int word_number(const char *words, const char *word, size_t length) {
    for (int number = 0; words != NULL; number++) {
        size_t each = strcspn(words, "|");
        if (each == length && memcmp(words, word, length) == 0) {
            return number;
        }
        words = words[each] == '|' ? words + each + 1 : NULL;
    }
    return -1;
}

/* A decimal number in [least, most]; -1 for anything else. */
static int parse_number(const char *text, size_t length, int least, int most) {
    long number = 0;
    if (length == 0 || length > 10) {
        return -1;
    }
    for (size_t i = 0; i < length; i++) {
        if (text[i] < '0' || text[i] > '9') {
            return -1;
        }
        number = number * 10 + (text[i] - '0');
    }
    return number >= least && number <= most ? (int)number : -1;
}

/* The same, with an optional unit. */
static int parse_bytes(const char *text, size_t length, int least, int most) {
    static const char units[] = "kKmMgG";
    const char *unit = length == 0 ? NULL : memchr(units, text[length - 1], sizeof units - 1);
    int shift = unit == NULL ? 0 : 10 * (1 + (int)(unit - units) / 2);
    int number = parse_number(text, length - (unit != NULL), 0, most >> shift);
    return number < 0 || number << shift < least ? -1 : number << shift;
}

static int set_text(const char *text, size_t length, int most) {
    if (length > (size_t)most || memchr(text, '|', length) != NULL) {
        return -1;
    }
    memcpy(profile_file_text, text, length);
    profile_file_text[length] = '\0';
    return (int)length;
}

static int parse_cpu(const struct option *option, const char *text, size_t length) {
    int number = word_number(option->words, text, length);
    if (number < 0) {
        number = parse_number(text, length, 0, option->most);
        number = number < 0 ? -1 : number + OPTION_OFFLOAD_CPU_FIRST;
    }
    return number;
}

static const struct option *find(const char *name, size_t length) {
    for (size_t i = 0; i < OPTION_COUNT; i++) {
        if (strlen(options[i].name) == length && memcmp(options[i].name, name, length) == 0) {
            return &options[i];
        }
    }
    return NULL;
}

/* The number that a value stands for, or -1 if it is invalid. Not for options that take text. */
static int parse(const struct option *option, const char *value, size_t length) {
    return takes_cpu(option)       ? parse_cpu(option, value, length)
           : option->words != NULL ? word_number(option->words, value, length)
           : is_bytes(option)      ? parse_bytes(value, length, option->least, option->most)
                                   : parse_number(value, length, option->least, option->most);
}

static int set(const struct option *option, const char *value, size_t length) {
    int number = is_text(option) ? set_text(value, length, option->most) : parse(option, value, length);
    if (number < 0) {
        return EINVAL;
    }
    atomic_store_explicit(option->value, number, memory_order_relaxed);
    if (option->value == &vectored) {
        purge_allow_vectored((enum purge_vectored)number);
    }
    return 0;
}

int options_set(const char *name, const char *value, size_t value_length) {
    const struct option *option = find(name, strlen(name));
    if (option == NULL) {
        return ENOENT;
    }
    if (option->change == CHANGE_AT_START) {
        return is_text(option) || parse(option, value, value_length) >= 0 ? EBUSY : EINVAL;
    }
    int error = set(option, value, value_length);
    if (error == 0 && option->value == &report) {
        statistics_prepare_report();
    }
    if (error == 0 && option->value == &profile) {
        unwind_learn_modules();
        error = profiling_apply() ? 0 : ENOMEM;
    }
    return error;
}

const char *options_name(size_t number) {
    return number < OPTION_COUNT ? options[number].name : NULL;
}

void options_value(size_t number, const char **word, int *value) {
    *value = atomic_load_explicit(options[number].value, memory_order_relaxed);
    *word = options[number].words;
    if (is_text(&options[number])) {
        *word = profile_file_text;
        return;
    }
    if (takes_cpu(&options[number]) && *value >= OPTION_OFFLOAD_CPU_FIRST) {
        *word = NULL;
        *value -= OPTION_OFFLOAD_CPU_FIRST;
        return;
    }
    for (int i = 0; *word != NULL && i < *value; i++) {
        *word += strcspn(*word, "|") + 1;
    }
}

static void complain(const char *what, const char *text, size_t length, const char *wanted) {
    char copy[64];
    size_t kept = length < sizeof copy ? length : sizeof copy - 1;
    memcpy(copy, text, kept);
    copy[kept] = '\0';
    struct text line = {0};
    text_string(&line, "calmalloc: ");
    text_string(&line, what);
    text_string(&line, " '");
    text_string(&line, copy);
    text_string(&line, "' in CALM_OPTIONS ignored");
    if (wanted != NULL) {
        text_string(&line, ": ");
        text_string(&line, wanted);
    }
    text_string(&line, "\n");
    text_write(&line, 2);
}

static void complain_of_value(const struct option *option, const char *text, size_t length) {
    struct text wanted = {0};
    text_string(&wanted, option->name);
    text_string(&wanted, " takes ");
    if (is_text(option)) {
        text_string(&wanted, "at most 1000 bytes without '|'");
    } else if (option->words != NULL) {
        text_string(&wanted, option->words);
        text_string(&wanted, takes_cpu(option) ? ", or a CPU's number" : "");
    } else {
        text_number(&wanted, (uint64_t)option->least);
        text_string(&wanted, " to ");
        text_number(&wanted, (uint64_t)option->most);
        text_string(&wanted, is_bytes(option) ? " bytes; k, m or g may follow" : "");
    }
    wanted.bytes[wanted.length] = '\0';
    complain("value of option", text, length, wanted.bytes);
}

static void read_one(const char *text, size_t length) {
    const char *equals = memchr(text, '=', length);
    size_t name_length = equals == NULL ? length : (size_t)(equals - text);
    const struct option *option = find(text, name_length);
    if (option == NULL) {
        complain("unknown option", text, length, NULL);
    } else if (equals == NULL || set(option, equals + 1, length - name_length - 1) != 0) {
        complain_of_value(option, text, length);
    }
}

static void set_defaults(void) {
    SETTINGS.policy = POLICY_ADAPTIVE;
    SETTINGS.slack = 100;
    SETTINGS.purge_time = 1;
    SETTINGS.background = 1;
    SETTINGS.watch_cgroup = 1;
    SETTINGS.huge_pages = 1;
    SETTINGS.placement = PLACEMENT_COLORS;
    SETTINGS.populate = 1;
}

static bool were_read;
static char **first_environment;

void options_keep_environment(char **environment) {
    first_environment = environment;
}

/* Like secure_getenv: NULL if the program runs with elevated privileges. */
static const char *find_variable(char **environment, const char *name) {
    size_t length = strlen(name);
    for (; getauxval(AT_SECURE) == 0 && *environment != NULL; environment++) {
        if (strncmp(*environment, name, length) == 0 && (*environment)[length] == '=') {
            return *environment + length + 1;
        }
    }
    return NULL;
}

static void read_environment(void) {
    char **environment = environ != NULL ? environ : first_environment;
    if (environment == NULL) {
        return;
    }
    were_read = true;
    const char *text = find_variable(environment, "CALM_OPTIONS");
    while (text != NULL && *text != '\0') {
        size_t length = strcspn(text, ",");
        if (length > 0) {
            read_one(text, length);
        }
        text += length + (text[length] == ',');
    }
}

void options_read(void) {
    set_defaults();
    read_environment();
}

bool options_read_late(void) {
    bool late = !were_read;
    if (late) {
        read_environment();
    }
    return late;
}

void options_apply_profile(void) {
    if (!profiling_apply()) {
        static const char line[] = "calmalloc: no memory for a profile: option 'profile' ignored\n";
        file_write(2, line, sizeof line - 1);
    }
}
