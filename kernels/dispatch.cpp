// Which of the built paths this machine can run.
#include <cstring>

#include "kernels.h"
#if defined(__x86_64__)
#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace bitnet {

#ifndef BITNET_X86
const Kernels* avx2_kernels() { return nullptr; }
const Kernels* avxvnni_kernels() { return nullptr; }
const Kernels* avx512_kernels() { return nullptr; }
void add_avx512vbmi(Kernels&) {}
void add_avx512pairs(Kernels&) {}
void add_avx512lookups(Kernels&) {}
void add_avx512bf16(Kernels&) {}
void add_avx512amx(Kernels&) {}
void add_avx512amx_attention(Kernels&) {}
#endif
#ifndef BITNET_ARM
const Kernels* neon_kernels() { return nullptr; }
#endif

namespace {

#if defined(__x86_64__)
bool has_avx2() {
    unsigned a, b, c, d;  // older clangs do not know "f16c"
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __get_cpuid(1, &a, &b, &c, &d) &&
           (c & 1u << 29);
}
bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni") && has_avx2();
}
bool has_avx512vbmi() { return __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("gfni"); }
#ifdef BITNET_EMULATED
bool has_avxvnni() { return has_avx512(); }
bool has_amx() { return has_avx512() && has_avx512vbmi(); }
bool has_pairs() { return has_avx512vbmi(); }
#else
bool has_avxvnni() {  // older compilers do not know the name
    unsigned a, b, c, d;
    return has_avx2() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 4);
}
bool has_pairs() { return has_avx512vbmi() && __builtin_cpu_is("amd"); }
// Linux lets a process use the tiles once it has asked.
bool has_amx() {
#ifdef __linux__
    unsigned a, b, c, d;
    constexpr long request_permission = 0x1023, tile_data = 18;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (c & 1u << 8) && (d & 1u << 22) && (d & 1u << 24) &&
           (d & 1u << 25) && syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
    return false;
#endif
}
#endif
// Of AMD's generations that read ahead best in order: 4 and 5 for Zen 4 and later ones, else 0.
int zen() {
    unsigned a, b, c, d;
    if (!__builtin_cpu_is("amd") || !__get_cpuid(1, &a, &b, &c, &d)) return 0;
    const unsigned family = (a >> 8 & 0xf) + (a >> 20 & 0xff);
    return family >= 0x1a ? 5 : family == 0x19 && has_avx512() ? 4 : 0;
}
bool has_bf16() { return zen() >= 4 && __builtin_cpu_supports("avx512bf16"); }
bool has_neon() { return false; }
#else
int zen() { return 0; }
bool has_avx2() { return false; }
bool has_avxvnni() { return false; }
bool has_avx512() { return false; }
bool has_avx512vbmi() { return false; }
bool has_pairs() { return false; }
bool has_bf16() { return false; }
bool has_amx() { return false; }
#if defined(__aarch64__) && defined(__linux__)
bool has_neon() { return getauxval(AT_HWCAP) & 1ul << 20; }  // HWCAP_ASIMDDP
#else
bool has_neon() { return true; }  // every 64-bit Apple core has dotprod
#endif
#endif

}  // namespace

bool fetches_in_order = false, fetches_near = false, reads_on = false;

namespace {

struct Available {
    Kernels avx512, avx512amx;
    const Kernels* list[6];
    int count = 0;
    Available() {
        fetches_in_order = zen() >= 4;
        fetches_near = zen() >= 5;
        reads_on = zen() == 4;
        if (has_avx512() && avx512_kernels()) offer_avx512();
        if (has_avxvnni()) offer(avxvnni_kernels());
        if (has_avx2()) offer(avx2_kernels());
        if (has_neon()) offer(neon_kernels());
        offer(generic_kernels());
    }
    void offer_avx512() {
        avx512 = *avx512_kernels();
        if (has_avx512vbmi()) add_avx512vbmi(avx512);
        if (has_avx512vbmi() && has_amx()) {
            avx512amx = avx512;
            add_avx512amx(avx512amx);
            add_avx512amx_attention(avx512amx);
            offer(&avx512amx);
        }
        if (has_pairs()) add_avx512pairs(avx512);
        if (has_pairs()) add_avx512lookups(avx512);
        if (has_bf16()) add_avx512bf16(avx512);
        offer(&avx512);
    }
    void offer(const Kernels* kernels) {
        if (kernels) list[count++] = kernels;
    }
};

}  // namespace

const Kernels* const* available_kernels(int* count) {
    static const Available available;
    *count = available.count;
    return available.list;
}

const Kernels* find_kernels(const char* name) {
    int count;
    const Kernels* const* list = available_kernels(&count);
    for (int i = 0; i < count; i++)
        if (!std::strcmp(list[i]->name, name)) return list[i];
    return nullptr;
}

}  // namespace bitnet
