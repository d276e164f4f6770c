// See twice.cpp.
#include "calmalloc.hpp"

#include "calmalloc.hpp"

void again();

void again() {
    calm::allocator<int> ints;
    ints.deallocate(ints.allocate(3), 3);
    (void)calm::resource();
}
