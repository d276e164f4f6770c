/* Forks: processes of one family share what one may keep, and a fork gives back what is kept for later. */
#include "arena/family.h"

#include "whole_allocator.h"

/* Processes that keep memory at the same time share what one may keep. */
static void test_family(void) {
    CHECK_EQUAL(calm_arenas.epoch.family.member, 0); /* not its parent's */
    struct family family = {0};
    CHECK(family_share(&family, 100 * MIB) == 1);
    family_before_fork(&family);
    CHECK(family_share(&family, 100 * MIB) == 1);
    for (int i = 0; i < 3; i++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            family_start_child(&family);
            family_share(&family, 100 * MIB);
            _exit(0);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
    }
    CHECK(family_share(&family, 100 * MIB) == 0.25);
    CHECK(family_share(&family, 300 * MIB) == 0.5);
    CHECK(family_share(&family, 0) > 0.33 && family_share(&family, 0) < 0.34);
    clock_advance(20 * DEMAND_EPOCH_NS); /* they keep nothing any more, or ended */
    CHECK(family_share(&family, 100 * MIB) == 1);
}

/* As if a fork had just purged. */
static void forbid_fork_purges(void) {
    lock_acquire(&calm_arenas.purger.lock);
    calm_arenas.purger.fork_epoch = calm_arenas.work->demand.epochs + 1;
    calm_arenas.work->demand.break_even_s = 1000;
    lock_release(&calm_arenas.purger.lock);
}

static void check_fork_gives_back(void) {
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        CHECK(stats_now().dirty <= RETENTION_FOREGROUND_BYTES);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(stats_now().dirty <= RETENTION_FOREGROUND_BYTES);
}

/* What is kept for later is given back before a fork, unless another fork just did. */
static void test_fork_gives_back(void) {
    build();
    free_all();
    clock_await_sleep(&calm_arenas.helper.wakeup);
    CHECK(stats_now().dirty > (WAVE - 1) * wave_bytes());
    check_fork_gives_back();
}

/* So does a process of one thread and without a helper, whose fork takes no locks. */
static void test_fork_of_one_thread_gives_back(void) {
    set("background", "off");
    void *kept = obtain(200 * MIB);
    calm_free(obtain(16 * MIB));
    CHECK(helper_is_gone());
    CHECK(stats_now().dirty > RETENTION_FOREGROUND_BYTES);
    check_fork_gives_back();
    calm_free(kept);
}

/* What a parent keeps for itself is given back in its child, which starts no helper to keep it. */
static void test_child_keeps_little(void) {
    build();
    free_all();
    clock_await_sleep(&calm_arenas.helper.wakeup);
    CHECK(stats_now().dirty > (WAVE - 1) * wave_bytes());
    forbid_fork_purges();
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        calm_free(obtain(300 * KIB));
        CHECK(helper_is_gone());
        CHECK(stats_now().dirty <= 2 * MIB);
        /* Until it has waves of its own. */
        for (int wave = 0; wave < 3; wave++) {
            build();
            free_all();
        }
        clock_await_sleep(&calm_arenas.helper.wakeup);
        CHECK(stats_now().dirty > (WAVE - 1) * wave_bytes());
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(stats_now().dirty > (WAVE - 1) * wave_bytes());
}

/* More forks within an epoch give nothing back: what the first one's cost is known at its end. */
static void test_fork_gives_back_once_an_epoch(void) {
    for (int fork_number = 0; fork_number < 2; fork_number++) {
        build();
        free_all();
        clock_await_sleep(&calm_arenas.helper.wakeup);
        CHECK(stats_now().dirty > (WAVE - 1) * wave_bytes());
        arena_shrink_for_fork(&calm_arenas);
        CHECK((stats_now().dirty > RETENTION_FOREGROUND_BYTES) == (fork_number == 1));
    }
}

int main(void) {
    prepare_governor();
    in_child(test_family);
    in_child(test_fork_gives_back_once_an_epoch);
    in_child(test_child_keeps_little);
    in_child(test_fork_gives_back);
    in_child(test_fork_of_one_thread_gives_back);
    return 0;
}
