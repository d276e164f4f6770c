#include "state.h"

struct state state;
