// All forms of new and delete, and what they do when there is no more.
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <vector>

#define CHECK(condition)                                                         \
    do {                                                                         \
        if (!(condition)) {                                                      \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            std::_Exit(1);                                                       \
        }                                                                        \
    } while (0)

namespace {

volatile std::size_t nothing = 0;

// Pairs of new and delete must not be optimized away.
void *used(void *block, std::size_t bytes, std::size_t alignment) {
    auto address = reinterpret_cast<std::uintptr_t>(block) + nothing;
    CHECK(address != 0 && address % alignment == 0);
    block = reinterpret_cast<void *>(address);
    std::memset(block, 0x5C, bytes);
    return block;
}

constexpr std::size_t DEFAULT = __STDCPP_DEFAULT_NEW_ALIGNMENT__;

void plain_forms(std::size_t bytes) {
    ::operator delete(used(::operator new(bytes), bytes, DEFAULT));
    ::operator delete(used(::operator new(bytes), bytes, DEFAULT), bytes);
    ::operator delete(used(::operator new(bytes), bytes, DEFAULT), std::nothrow);
    ::operator delete[](used(::operator new[](bytes), bytes, DEFAULT));
    ::operator delete[](used(::operator new[](bytes), bytes, DEFAULT), bytes);
    ::operator delete[](used(::operator new[](bytes), bytes, DEFAULT), std::nothrow);
    ::operator delete(used(::operator new(bytes, std::nothrow), bytes, DEFAULT));
    ::operator delete(used(::operator new(bytes, std::nothrow), bytes, DEFAULT), bytes);
    ::operator delete(used(::operator new(bytes, std::nothrow), bytes, DEFAULT), std::nothrow);
    ::operator delete[](used(::operator new[](bytes, std::nothrow), bytes, DEFAULT));
    ::operator delete[](used(::operator new[](bytes, std::nothrow), bytes, DEFAULT), std::nothrow);
}

void aligned_forms(std::size_t bytes, std::size_t alignment) {
    auto align = static_cast<std::align_val_t>(alignment);
    ::operator delete(used(::operator new(bytes, align), bytes, alignment), align);
    ::operator delete(used(::operator new(bytes, align), bytes, alignment), bytes, align);
    ::operator delete(used(::operator new(bytes, align), bytes, alignment), align, std::nothrow);
    ::operator delete[](used(::operator new[](bytes, align), bytes, alignment), align);
    ::operator delete[](used(::operator new[](bytes, align), bytes, alignment), bytes, align);
    ::operator delete[](used(::operator new[](bytes, align), bytes, alignment), align, std::nothrow);
    ::operator delete(used(::operator new(bytes, align, std::nothrow), bytes, alignment), align);
    ::operator delete(used(::operator new(bytes, align, std::nothrow), bytes, alignment), bytes, align);
    ::operator delete[](used(::operator new[](bytes, align, std::nothrow), bytes, alignment), align);
    ::operator delete[](used(::operator new[](bytes, align, std::nothrow), bytes, alignment), align,
                        std::nothrow);
}

void all_forms() {
    for (std::size_t bytes = 0; bytes < 3000000; bytes = bytes < 300 ? bytes + 1 : bytes * 2 + 3) {
        plain_forms(bytes);
        for (std::size_t alignment = 32; alignment <= 65536; alignment *= 4) {
            aligned_forms(bytes, alignment);
        }
    }
    // Nothing at all is still a block of its own.
    void *first = ::operator new(nothing), *second = ::operator new(nothing);
    CHECK(first != nullptr && second != nullptr && first != second);
    ::operator delete(first);
    ::operator delete(second);
    ::operator delete(nullptr);
    ::operator delete[](nullptr, std::size_t{5});
    ::operator delete (nullptr, std::align_val_t{64});
}

struct alignas(256) Wide {
    char bytes[300];
};

struct Counted {
    static int alive;
    std::string text = std::string(100, 'x');
    Counted() {
        alive++;
    }
    ~Counted() {
        alive--;
    }
};
int Counted::alive = 0;

void expressions() {
    for (int i = 0; i < 1000; i++) {
        auto wide = std::make_unique<Wide>();
        CHECK(reinterpret_cast<std::uintptr_t>(wide.get()) % 256 == 0);
        std::unique_ptr<Wide[]> wides(new Wide[1 + i % 5]);
        CHECK(reinterpret_cast<std::uintptr_t>(wides.get()) % 256 == 0);
        std::unique_ptr<Counted[]> counted(new Counted[1 + i % 7]);
        CHECK(Counted::alive == 1 + i % 7);
    }
    CHECK(Counted::alive == 0);
}

// The largest that a block may have, and far more than there is.
std::size_t too_much() {
    return static_cast<std::size_t>(std::numeric_limits<std::ptrdiff_t>::max()) - 4096 + nothing;
}

template <typename Call> bool throws_bad_alloc(Call call) {
    try {
        call();
    } catch (const std::bad_alloc &) {
        return true;
    }
    return false;
}

void failures() {
    constexpr auto align = std::align_val_t{128};
    // Not SIZE_MAX: libstdc++ rounds that up to the alignment, which is 0.
    for (std::size_t bytes : {too_much(), too_much() / 2, static_cast<std::size_t>(-1) / 2 - 100 - nothing}) {
        CHECK(throws_bad_alloc([=] { used(::operator new(bytes), 0, 1); }));
        CHECK(throws_bad_alloc([=] { used(::operator new[](bytes), 0, 1); }));
        CHECK(throws_bad_alloc([=] { used(::operator new(bytes, align), 0, 1); }));
        CHECK(throws_bad_alloc([=] { used(::operator new[](bytes, align), 0, 1); }));
        CHECK(::operator new(bytes, std::nothrow) == nullptr);
        CHECK(::operator new[](bytes, std::nothrow) == nullptr);
        CHECK(::operator new(bytes, align, std::nothrow) == nullptr);
        CHECK(::operator new[](bytes, align, std::nothrow) == nullptr);
    }
    CHECK(throws_bad_alloc([] { std::vector<char> vector(too_much(), 1); }));
    // An object whose constructor throws is given back.
    struct Throws {
        Throws() {
            throw 1;
        }
        char bytes[5000];
    };
    for (int i = 0; i < 1000; i++) {
        try {
            std::make_unique<Throws>();
            CHECK(false);
        } catch (int) {
        }
    }
}

int calls = 0;

void count_to_three() {
    if (++calls == 3) {
        std::set_new_handler(nullptr);
    }
}

void throw_another() {
    throw std::bad_alloc();
}

template <typename Call> int handler_calls(Call call) {
    calls = 0;
    std::set_new_handler(count_to_three);
    call();
    CHECK(std::get_new_handler() == nullptr);
    return calls;
}

// The handler is called, again and again, until it gives up.
void handlers() {
    constexpr auto align = std::align_val_t{64};
    std::size_t bytes = too_much();
    CHECK(handler_calls([=] { CHECK(throws_bad_alloc([=] { used(::operator new(bytes), 0, 1); })); }) == 3);
    CHECK(handler_calls([=] { CHECK(throws_bad_alloc([=] { used(::operator new[](bytes), 0, 1); })); }) == 3);
    CHECK(handler_calls(
              [=] { CHECK(throws_bad_alloc([=] { used(::operator new(bytes, align), 0, 1); })); }) == 3);
    CHECK(handler_calls([=] { CHECK(::operator new(bytes, std::nothrow) == nullptr); }) == 3);
    CHECK(handler_calls([=] { CHECK(::operator new(bytes, align, std::nothrow) == nullptr); }) == 3);
    CHECK(handler_calls([=] {
              CHECK(std::malloc(bytes) == nullptr && errno == ENOMEM);
              std::set_new_handler(nullptr);
          }) == 0);
    // What it throws passes through new, and not through a nothrow one.
    std::set_new_handler(throw_another);
    CHECK(throws_bad_alloc([=] { used(::operator new(bytes), 0, 1); }));
    CHECK(::operator new(bytes, std::nothrow) == nullptr);
    std::set_new_handler(nullptr);
}

// Made by one thread, grown by another, destroyed by a third.
void containers() {
    std::map<int, std::vector<std::string>> shared;
    std::thread([&shared] {
        for (int i = 0; i < 2000; i++) {
            shared[i].assign(1 + i % 20, std::string(i % 300, static_cast<char>('a' + i % 26)));
        }
    }).join();
    std::thread([&shared] {
        for (auto &[key, texts] : shared) {
            texts.emplace_back(1000, 'z');
            texts.reserve(texts.size() * 3);
        }
    }).join();
    std::thread([&shared] {
        for (const auto &[key, texts] : shared) {
            CHECK(static_cast<int>(texts.size()) == 2 + key % 20);
            CHECK(texts.front() == std::string(key % 300, static_cast<char>('a' + key % 26)));
            CHECK(texts.back() == std::string(1000, 'z'));
        }
        shared.clear();
    }).join();
}

// Destroyed as its thread ends, after all else in it.
struct AtThreadEnd {
    std::unique_ptr<std::string> text;
    ~AtThreadEnd() {
        CHECK(text != nullptr && *text == std::string(500, 'q'));
        text.reset();
        std::vector<std::string> more(20, std::string(700, 'r'));
        CHECK(more.back().back() == 'r');
    }
};

thread_local AtThreadEnd at_thread_end;

void thread_locals() {
    for (int i = 0; i < 300; i++) {
        std::thread([] { at_thread_end.text = std::make_unique<std::string>(500, 'q'); }).join();
    }
    at_thread_end.text = std::make_unique<std::string>(500, 'q');
}

} // namespace

int main(int argc, char **argv) {
    const std::map<std::string, void (*)()> cases = {
        {"forms", all_forms},   {"expressions", expressions}, {"failures", failures},
        {"handlers", handlers}, {"containers", containers},   {"thread-locals", thread_locals},
    };
    CHECK(argc >= 2 && cases.count(argv[1]) == 1);
    cases.at(argv[1])();
    return 0;
}
