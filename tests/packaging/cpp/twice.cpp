// With again.cpp a program of two files, each of which includes the header twice.
#include "calmalloc.hpp"

#include "calmalloc.hpp"

void again();

int main() {
    calm::allocator<int> ints;
    ints.deallocate(ints.allocate(3), 3);
    (void)calm::resource();
    again();
}
