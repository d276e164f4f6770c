/*
 * What the first touch of a page costs here: no table could say.
 */
#ifndef CALM_GOVERNOR_FAULT_H
#define CALM_GOVERNOR_FAULT_H

#include "governor/governor.h"

/* Measured when it is first wanted; by several threads, if they come at once. */
double fault_ns(struct governor *governor);

#endif
