// A C++ extension of a C program: what it asks too much of new for must reach it as C++ says.
#include <new>

namespace {

int calls;

void handle() {
    if (++calls == 3) {
        std::set_new_handler(nullptr);
    }
}

// More than there is address space for.
volatile unsigned long too_much = 1UL << 60;

} // namespace

extern "C" int catches() {
    try {
        ::operator delete(::operator new(too_much));
    } catch (const std::bad_alloc &) {
        return 1;
    }
    return 0;
}

// How often the new-handler was called before the exception.
extern "C" int handles() {
    std::set_new_handler(handle);
    return catches() == 1 ? calls : -1;
}
