#include "offload/crowd.h"

#include "os/clock.h"

/* So often it looks whether others run on its CPU: that is so if it ran less than that share of the time. */
#define LOOK_NS 8000000ULL
#define SHARE   0.85
/* All CPUs are busy if the process leaves less than that idle; and there is room if it leaves more than that.
 */
#define BUSY_IDLE_CPUS 0.15
#define ROOM_CPUS      0.75
#define AWAY_NS_LEAST  50000000ULL
#define AWAY_NS_MOST   3200000000ULL
/* Back for so many times as long as it was away: what was is no sign of what will be. */
#define BACK_TIMES 16
#define LEAST_NS   1000000ULL

static void look(struct crowd *crowd, uint64_t now_ns) {
    crowd->looked_ns = now_ns;
    crowd->ran_ns = clock_read_ns(CLOCK_THREAD_CPUTIME_ID);
    crowd->used_ns = clock_read_ns(CLOCK_PROCESS_CPUTIME_ID);
    crowd->slept_ns = 0;
}

bool crowd_is_there(struct crowd *crowd, uint64_t now_ns) {
    struct crowd before = *crowd;
    if (before.looked_ns != 0 && now_ns - before.looked_ns < LOOK_NS) {
        return false;
    }
    look(crowd, now_ns);
    double passed = (double)(now_ns - before.looked_ns);
    double ran = (double)(crowd->ran_ns - before.ran_ns);
    double used = (double)(crowd->used_ns - before.used_ns);
    bool disturbed = ran < SHARE * (passed - (double)before.slept_ns);
    bool busy = used > (crowd->cpus - BUSY_IDLE_CPUS) * passed && ran < SHARE * passed;
    bool crowded = before.looked_ns != 0 && (disturbed || busy);
    crowd->crowded_looks = crowded ? before.crowded_looks + 1 : 0;
    return crowd->crowded_looks >= CROWD_LOOKS;
}

void crowd_give_way(struct crowd *crowd, uint64_t now_ns) {
    if (crowd->away_ns != 0 && now_ns - crowd->back_ns > BACK_TIMES * crowd->away_ns) {
        crowd->away_ns = 0;
    }
    uint64_t most = crowd->away_ns * 2 < AWAY_NS_MOST ? crowd->away_ns * 2 : AWAY_NS_MOST;
    crowd->away_ns = most < AWAY_NS_LEAST ? AWAY_NS_LEAST : most;
    crowd->away_until_ns = now_ns + crowd->away_ns;
    look(crowd, now_ns);
    crowd->crowded_looks = 0;
}

uint64_t crowd_away_ns(const struct crowd *crowd, uint64_t now_ns, uint64_t most_ns) {
    uint64_t left = crowd->away_until_ns > now_ns ? crowd->away_until_ns - now_ns : 0;
    return left < LEAST_NS ? LEAST_NS : left < most_ns ? left : most_ns;
}

bool crowd_has_room(struct crowd *crowd, uint64_t now_ns) {
    if (now_ns < crowd->away_until_ns) {
        return false;
    }
    struct crowd before = *crowd;
    look(crowd, now_ns);
    crowd->away_until_ns = now_ns + crowd->away_ns;
    double used = (double)(crowd->used_ns - before.used_ns) / (double)(now_ns - before.looked_ns + 1);
    bool room = used < crowd->cpus - ROOM_CPUS;
    crowd->back_ns = room ? now_ns : crowd->back_ns;
    return room;
}
