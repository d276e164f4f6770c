/* A plugin for QEMU's user mode that sees every load and store of a program. Either it feeds them to the
 * model of a machine (machine.h), a CPU for each thread, and writes what that has counted as JSON when the
 * program ends; or it records them, for calm-trace-replay.
 *
 *   qemu-x86_64 -plugin libcalm-trace.so,out=FILE[,warm=N][,limit=N][,marked=1][,nodes=N][,cpus=N] PROGRAM…
 *   qemu-x86_64 -plugin libcalm-trace.so,record=FILE -E LD_PRELOAD=libcalm-trace-marks.so PROGRAM…
 *
 * warm: the first N instructions fill the caches and count nowhere. limit: after N more the program is ended.
 * The server's, with calmoffload, count in neither, nor do those of a waiting thread, which are
 * told apart: a stretch from one instruction that is there for such loops (x86's pause, Arm's yield) to the
 * next, short, and without a miss of this CPU's caches, so that no other thread had news for it.
 *
 * marked: only what the program does between two marks counts (record.h). nodes: CPU n belongs to node n
 * modulo N. cpus: the program is told that it has N CPUs, at most 64, and restartable sequences (topology.h);
 * otherwise it sees no sequences, because QEMU has none.
 *
 * Children of fork are not followed. */
#include <inttypes.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include "json.h"
#include "machine.h"
#include "qemu_plugin.h"
#include "record.h"
#include "topology.h"
#include "turns.h"

QEMU_PLUGIN_EXPORT int qemu_plugin_version = QEMU_PLUGIN_INTERFACE;

enum {
    QUANTUM = 200,      /* instructions in a turn */
    WAIT_LONGEST = 500, /* instructions in a stretch of waiting */
    NAME_BYTES = 16,
    RECORDS = 4096, /* written at once */
    MOST_CPUS = 64, /* that a program may be told of: the smallest set of CPUs that the kernel fills in */
    SEQUENCE_LONGEST = 1000,   /* instructions in a restartable sequence */
    RESTART_TIMEOUT_MS = 1000, /* for threads that do not run */
};

/* The name of calmoffload's own thread. */
static const char server[] = "calmalloc";

/* What was counted of a CPU before. */
struct mark {
    uint64_t instructions;
    uint64_t accesses[MACHINE_KINDS];
    uint64_t misses;
};

struct thread {
    char name[NAME_BYTES];
    bool used;
    bool inside;              /* of the allocator, by its marks */
    atomic_bool in_call;      /* of the system */
    atomic_ulong ran;         /* instructions, whatever counts */
    bool has_paused;          /* so the mark is valid */
    uint64_t instructions;    /* all that it has run */
    uint64_t turn_began;      /* instructions at that time */
    struct mark at_pause;     /* at the last pause */
    struct mark waited;       /* the sums of the stretches of waiting */
    uint64_t since_record;    /* instructions since its last record */
    uint64_t counted_already; /* instructions that are in the sum for warm and limit */
};

static struct {
    const char *out;
    const char *record;
    uint64_t warm;
    uint64_t limit;
    uint64_t marked;
    uint64_t nodes;
    uint64_t cpus;
} options;

static struct thread threads[TURNS_THREADS];
static atomic_uint alive; /* of them */
static struct machine_shape shape;
static struct machine *machine;
static FILE *records;
static struct record record_buffer[RECORDS];
static size_t record_count;
static struct json report;
static unsigned reported; /* threads in the report */
static bool warmed;
static uint64_t run;                        /* instructions of all threads but the server, without waiting */
static atomic_flag busy = ATOMIC_FLAG_INIT; /* all of the above but a thread's own */
static bool off;                            /* in a child, and when the report is written */

static void lock(void) {
    while (atomic_flag_test_and_set_explicit(&busy, memory_order_acquire)) {
        (void)sched_yield();
    }
}

static void unlock(void) {
    atomic_flag_clear_explicit(&busy, memory_order_release);
}

static _Noreturn void give_up(const char *why) {
    fprintf(stderr, "calm-trace: %s\n", why);
    _exit(1);
}

/* The report. */

static void write_kinds(const char *name, const uint64_t *values) {
    json_begin(&report, name);
    json_int(&report, "loads", values[MACHINE_LOAD]);
    json_int(&report, "stores", values[MACHINE_STORE]);
    json_end(&report);
}

static void write_thread(unsigned cpu) {
    const struct thread *thread = &threads[cpu];
    const struct machine_counts *counts = machine_counts(machine, cpu);
    char number[16];
    (void)snprintf(number, sizeof number, "%u", reported++);
    json_begin(&report, number);
    json_text(&report, "name", thread->name);
    json_int(&report, "instructions", thread->instructions);
    json_int(&report, "waiting", thread->waited.instructions);
    write_kinds("accesses", counts->accesses);
    write_kinds("waiting_accesses", thread->waited.accesses);
    write_kinds("l1_misses", counts->l1_misses);
    write_kinds("l2_misses", counts->l2_misses);
    write_kinds("llc_misses", counts->llc_misses);
    write_kinds("coherence", counts->coherence);
    write_kinds("transfers", counts->transfers);
    json_int(&report, "upgrades", counts->upgrades);
    write_kinds("tlb_misses", counts->tlb_misses);
    write_kinds("walks", counts->walks);
    json_int(&report, "invalidations", counts->invalidations);
    write_kinds("remote_lines", counts->remote_lines);
    write_kinds("remote_pages", counts->remote_pages);
    json_end(&report);
}

static void write_shape(const char *name, struct cache_shape cache, uint64_t entry_bytes) {
    json_begin(&report, name);
    json_int(&report, "bytes", entry_bytes * cache.sets * cache.ways);
    json_int(&report, "ways", cache.ways);
    json_end(&report);
}

static void begin_report(void) {
    report.file = fopen(options.out, "we");
    if (report.file == NULL) {
        perror(options.out);
        exit(1);
    }
    json_begin(&report, NULL);
    json_begin(&report, "threads");
}

static void end_report(bool limited) {
    for (unsigned cpu = 0; cpu < TURNS_THREADS; cpu++) {
        if (threads[cpu].used) {
            write_thread(cpu);
        }
    }
    json_end(&report);
    json_begin(&report, "machine");
    write_shape("l1", shape.l1, MACHINE_LINE_BYTES);
    write_shape("l2", shape.l2, MACHINE_LINE_BYTES);
    write_shape("llc", shape.llc, MACHINE_LINE_BYTES);
    write_shape("tlb", shape.tlb, MACHINE_PAGE_BYTES);
    write_shape("stlb", shape.stlb, MACHINE_PAGE_BYTES);
    json_end(&report);
    json_bool(&report, "warmed", warmed);
    json_bool(&report, "limited", limited);
    json_int(&report, "turns_lost", turns_lost());
    json_end(&report);
    fputc('\n', report.file);
    if (fclose(report.file) != 0) {
        give_up("the report could not be written");
    }
}

/* The recording. */

static void write_records(void) {
    if (fwrite(record_buffer, sizeof *record_buffer, record_count, records) != record_count) {
        give_up("the trace could not be written");
    }
    record_count = 0;
}

static void add_record(unsigned cpu, enum record_kind kind, uint64_t address, uint64_t bytes) {
    struct thread *thread = &threads[cpu];
    uint64_t since = thread->since_record < UINT16_MAX ? thread->since_record : UINT16_MAX;
    thread->since_record -= since;
    record_buffer[record_count++] = (struct record){
        .address = address,
        .bytes = bytes < UINT32_MAX ? (uint32_t)bytes : UINT32_MAX,
        .instructions = (uint16_t)since,
        .kind = (uint8_t)kind,
        .thread = (uint8_t)cpu,
    };
    if (record_count == RECORDS) {
        write_records();
    }
}

static void note_mark(unsigned cpu, uint64_t kind, uint64_t address, uint64_t bytes) {
    threads[cpu].inside = kind == MARK_ENTER;
    if (kind == MARK_MALLOC) {
        add_record(cpu, RECORD_MALLOC, address, bytes);
    } else if (kind == MARK_FREE) {
        add_record(cpu, RECORD_FREE, address, 0);
    }
}

/* The end, by itself or by the limit. */
static void finish(bool limited) {
    off = true;
    if (machine != NULL) {
        end_report(limited);
    } else {
        write_records();
        if (fclose(records) != 0) {
            give_up("the trace could not be written");
        }
    }
}

/* What the caches have counts on, of a thread that goes on. */
static void forget(unsigned cpu) {
    struct thread *thread = &threads[cpu];
    thread->instructions = 0;
    thread->turn_began = 0;
    thread->counted_already = 0;
    thread->has_paused = false;
    thread->waited = (struct mark){0};
    machine_clear_cpu(machine, cpu);
}

/* Counts from here on. */
static void begin_to_count(void) {
    warmed = true;
    run = 0;
    for (unsigned each = 0; each < TURNS_THREADS; each++) {
        if (threads[each].used) {
            forget(each);
        }
    }
}

/* Adds up what a thread has run, at the end of its turn. */
static void sum_up(unsigned cpu) {
    struct thread *thread = &threads[cpu];
    uint64_t counts = thread->instructions - thread->waited.instructions;
    /* A stretch may turn out to have been waiting after it was counted. */
    if (strcmp(thread->name, server) != 0) {
        run += counts - thread->counted_already;
    }
    thread->counted_already = counts;
    if (!warmed && options.marked == 0 && run >= options.warm) {
        begin_to_count();
    } else if (warmed && options.limit != 0 && run >= options.limit) {
        finish(true);
        _exit(0);
    }
}

/* QEMU's calls. */

static struct thread *begun(unsigned cpu) {
    if (cpu >= TURNS_THREADS) {
        give_up("the program has more than 128 threads at a time");
    }
    struct thread *thread = &threads[cpu];
    if (!thread->used) {
        *thread = (struct thread){.used = true};
        alive++;
        (void)prctl(PR_GET_NAME, thread->name);
    }
    return thread;
}

static void end_turn(unsigned cpu) {
    threads[cpu].turn_began = threads[cpu].instructions;
    if (machine != NULL) {
        lock();
        if (!off) {
            sum_up(cpu);
        }
        unlock();
    }
    turns_pass(cpu);
}

static void executed(unsigned cpu, void *instructions) {
    if (off) {
        return;
    }
    struct thread *thread = begun(cpu);
    if (thread->instructions - thread->turn_began >= QUANTUM) {
        end_turn(cpu);
    }
    if (!turns_mine(cpu)) {
        turns_take(cpu);
    }
    thread->instructions += (uintptr_t)instructions;
    unsigned long ran = atomic_load_explicit(&thread->ran, memory_order_relaxed);
    atomic_store_explicit(&thread->ran, ran + (uintptr_t)instructions, memory_order_relaxed);
    if (!thread->inside) {
        thread->since_record += (uintptr_t)instructions;
    }
}

static void accessed(unsigned cpu, qemu_plugin_meminfo_t info, uint64_t address, void *data) {
    (void)data;
    if (off) {
        return;
    }
    uint64_t bytes = 1ULL << qemu_plugin_mem_size_shift(info);
    bool is_store = qemu_plugin_mem_is_store(info);
    lock();
    if (machine != NULL) {
        machine_access(machine, cpu, address, bytes, is_store);
        if (is_store && options.cpus != 0) {
            topology_stored(cpu, address);
        }
    } else if (!threads[cpu].inside) {
        add_record(cpu, is_store ? RECORD_STORE : RECORD_LOAD, address, bytes);
    }
    unlock();
}

static struct mark mark_of(unsigned cpu) {
    const struct machine_counts *counts = machine_counts(machine, cpu);
    struct mark mark = {.instructions = threads[cpu].instructions};
    for (unsigned kind = 0; kind < MACHINE_KINDS; kind++) {
        mark.accesses[kind] = counts->accesses[kind];
        mark.misses += counts->l2_misses[kind];
    }
    mark.misses += counts->upgrades;
    return mark;
}

static void paused(unsigned cpu, void *data) {
    (void)data;
    if (off || machine == NULL) {
        return;
    }
    struct thread *thread = &threads[cpu];
    lock();
    struct mark now = mark_of(cpu);
    uint64_t length = now.instructions - thread->at_pause.instructions;
    if (thread->has_paused && length <= WAIT_LONGEST && now.misses == thread->at_pause.misses) {
        thread->waited.instructions += length;
        for (unsigned kind = 0; kind < MACHINE_KINDS; kind++) {
            thread->waited.accesses[kind] += now.accesses[kind] - thread->at_pause.accesses[kind];
        }
    }
    thread->at_pause = now;
    thread->has_paused = true;
    unlock();
    /* Whom it waits for may run, on this CPU too. */
    end_turn(cpu);
    if (alive > 1) {
        (void)sched_yield();
    }
}

static bool is_pause(const struct qemu_plugin_insn *insn) {
    static const unsigned char x86_pause[] = {0xf3, 0x90};
    static const unsigned char arm_yield[] = {0x3f, 0x20, 0x03, 0xd5};
    size_t size = qemu_plugin_insn_size(insn);
    const void *data = qemu_plugin_insn_data(insn);
    return (size == sizeof x86_pause && memcmp(data, x86_pause, size) == 0) ||
           (size == sizeof arm_yield && memcmp(data, arm_yield, size) == 0);
}

static void translated(qemu_plugin_id_t id, struct qemu_plugin_tb *tb) {
    (void)id;
    uintptr_t count = qemu_plugin_tb_n_insns(tb);
    const struct qemu_plugin_insn *first = qemu_plugin_tb_get_insn(tb, 0);
    topology_set_base((ptrdiff_t)((uintptr_t)qemu_plugin_insn_haddr(first) - qemu_plugin_insn_vaddr(first)));
    qemu_plugin_register_vcpu_tb_exec_cb(tb, executed, QEMU_PLUGIN_CB_NO_REGS, (void *)count);
    for (size_t i = 0; i < count; i++) {
        struct qemu_plugin_insn *insn = qemu_plugin_tb_get_insn(tb, i);
        qemu_plugin_register_vcpu_mem_cb(insn, accessed, QEMU_PLUGIN_CB_NO_REGS, QEMU_PLUGIN_MEM_RW, NULL);
        if (is_pause(insn)) {
            qemu_plugin_register_vcpu_insn_exec_cb(insn, paused, QEMU_PLUGIN_CB_NO_REGS, NULL);
        }
    }
}

/* Waits until no thread is in a sequence that it began before the call: each that is not in a system call has
 * run for longer than a sequence takes. */
static void wait_for_sequences(unsigned cpu) {
    unsigned long ran[TURNS_THREADS];
    for (unsigned each = 0; each < TURNS_THREADS; each++) {
        ran[each] = threads[each].ran;
    }
    struct timespec pause = {.tv_nsec = 1000000};
    for (unsigned each = 0, waited = 0; each < TURNS_THREADS && waited < RESTART_TIMEOUT_MS;) {
        const struct thread *other = &threads[each];
        if (each == cpu || !other->used || other->in_call || other->ran - ran[each] > SEQUENCE_LONGEST) {
            each++;
        } else {
            (void)nanosleep(&pause, NULL);
            waited++;
        }
    }
}

/* A sequence that runs meanwhile may have begun with a number that the first renewal replaced: so there are
 * two of each. */
static void restart_sequences(unsigned cpu) {
    for (unsigned pass = 0; pass < 2; pass++) {
        lock();
        topology_renew();
        unlock();
        wait_for_sequences(cpu);
    }
}

static void note_window(unsigned cpu, uint64_t kind) {
    lock();
    if (kind == MARK_BEGIN) {
        begin_to_count();
    } else if (kind == MARK_END) {
        finish(false);
    }
    unlock();
    if (off) {
        turns_pass(cpu);
    }
}

static void called(qemu_plugin_id_t id, unsigned int cpu, int64_t number, uint64_t a1, uint64_t a2,
                   uint64_t a3, uint64_t a4, uint64_t a5, uint64_t a6, uint64_t a7, uint64_t a8) {
    (void)id, (void)a4, (void)a5, (void)a6, (void)a7, (void)a8;
    if (off) {
        return;
    }
    if (number != MARK_CALL) {
        begun(cpu)->in_call = true;
        end_turn(cpu);
        if (options.cpus != 0) {
            lock();
            topology_called(cpu, number, (uint64_t[]){a1, a2, a3});
            unlock();
            if (topology_is_restart(number, a1)) {
                restart_sequences(cpu);
            }
        }
    } else if (records != NULL) {
        lock();
        note_mark(cpu, a1, a2, a3);
        unlock();
    } else if (options.marked != 0) {
        note_window(cpu, a1);
    }
}

/* A name is given by a system call, the thread's own or, before it has run much, another's. */
static void returned(qemu_plugin_id_t id, unsigned int cpu, int64_t number, int64_t result) {
    (void)id;
    if (off || number == MARK_CALL) {
        return;
    }
    struct thread *thread = begun(cpu);
    (void)prctl(PR_GET_NAME, thread->name);
    if (options.cpus != 0) {
        lock();
        topology_returned(cpu, number, result);
        if (machine != NULL) {
            machine_set_node(machine, cpu, topology_node(cpu));
        }
        unlock();
    }
    thread->in_call = false;
}

static void thread_ended(qemu_plugin_id_t id, unsigned int cpu) {
    (void)id;
    if (off || cpu >= TURNS_THREADS || !threads[cpu].used) {
        return;
    }
    end_turn(cpu);
    lock();
    if (machine != NULL && !off) {
        if (warmed) {
            write_thread(cpu);
        }
        machine_clear_cpu(machine, cpu);
    }
    topology_thread_ended(cpu);
    threads[cpu].used = false;
    alive--;
    unlock();
}

static void program_ended(qemu_plugin_id_t id, void *data) {
    (void)id, (void)data;
    /* In a child no thread may be left that would release the lock. */
    if (off) {
        return;
    }
    lock();
    if (!off) {
        finish(false);
    }
    unlock();
}

static void forked(void) {
    off = true;
}

static bool read_text(const char *argument, const char *name, const char **value) {
    size_t length = strlen(name);
    if (strncmp(argument, name, length) != 0 || argument[length] != '=') {
        return false;
    }
    *value = argument + length + 1;
    return true;
}

static bool read_number(const char *argument, const char *name, uint64_t *value) {
    const char *text;
    if (!read_text(argument, name, &text)) {
        return false;
    }
    char *end;
    *value = strtoull(text, &end, 10);
    return end != text && *end == '\0';
}

static bool read_option(const char *argument) {
    return read_text(argument, "out", &options.out) || read_text(argument, "record", &options.record) ||
           read_number(argument, "warm", &options.warm) || read_number(argument, "limit", &options.limit) ||
           read_number(argument, "marked", &options.marked) ||
           read_number(argument, "nodes", &options.nodes) || read_number(argument, "cpus", &options.cpus);
}

int qemu_plugin_install(qemu_plugin_id_t id, const void *info, int argc, char **argv) {
    (void)info;
    for (int i = 0; i < argc; i++) {
        if (!read_option(argv[i])) {
            fprintf(stderr, "calm-trace: no such option: %s\n", argv[i]);
            return 1;
        }
    }
    if ((options.out == NULL) == (options.record == NULL)) {
        fputs("calm-trace: out=FILE or record=FILE is needed\n", stderr);
        return 1;
    }
    if (options.nodes > MACHINE_CPUS || options.cpus > MOST_CPUS) {
        fprintf(stderr, "calm-trace: at most %d nodes and %d CPUs\n", MACHINE_CPUS, MOST_CPUS);
        return 1;
    }
    warmed = options.warm == 0 && options.marked == 0;
    shape = machine_default;
    shape.nodes = (uint32_t)options.nodes;
    topology_init((unsigned)options.cpus, (unsigned)options.nodes);
    if (options.out != NULL) {
        machine = machine_new(&shape);
        begin_report();
    } else {
        records = fopen(options.record, "we");
    }
    if (machine == NULL && records == NULL) {
        perror("calm-trace");
        return 1;
    }
    (void)pthread_atfork(NULL, NULL, forked);
    qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
    qemu_plugin_register_vcpu_syscall_cb(id, called);
    qemu_plugin_register_vcpu_syscall_ret_cb(id, returned);
    qemu_plugin_register_vcpu_exit_cb(id, thread_ended);
    qemu_plugin_register_atexit_cb(id, program_ended, NULL);
    return 0;
}
