/* Numbers that look random, of numbers that do not. */
#ifndef CALM_OS_MIX_H
#define CALM_OS_MIX_H

#include <stdint.h>

/* By which SplitMix64 moves from one number to the next. */
#define OS_MIX_STEP 0x9e3779b97f4a7c15ULL

/* How SplitMix64 (Steele, Lea and Flood, 2014) ends: one to one, and every bit depends on every bit. */
static inline uint64_t os_mixed(uint64_t number) {
    number = (number ^ number >> 30) * 0xbf58476d1ce4e5b9ULL;
    number = (number ^ number >> 27) * 0x94d049bb133111ebULL;
    return number ^ number >> 31;
}

#endif
