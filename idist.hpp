/* idist.hpp - v0.2.0 - idist.h for C++: exceptions, spans, RAII - MIT license

DO THIS

    In ONE C++ file of the program, unless a C file does it:     in all others, just:

        #define IDIST_IMPLEMENTATION                                 #include "idist.hpp"
        #include "idist.hpp"

A COMPLETE PROGRAM

        #define IDIST_IMPLEMENTATION
        #include "idist.hpp"
        #include <cstdio>
        #include <vector>

        int main() {
            try {
                std::vector<float> x = {1, 2, 3};
                idist::spawn([&](int) {
                    idist::all_reduce(x, idist::sum);
                    float total = idist::all_reduce(x[0], idist::max);
                    std::printf("rank %d: %g %g\n", idist::rank(), x[1], total);
                }, 4);
            } catch (const idist::error &e) {
                std::fprintf(stderr, "%s\n", e.what());
                return 1;
            }
        }

    c++ app.cpp -o app && ./app

        rank 2: 8 4              (four lines, in any order)

CONTENTS

    Search for the tags.

      [hpp:error]      exceptions
      [hpp:dtype]      element types
      [hpp:span]       buffers
      [hpp:life]       worlds and groups
      [hpp:call]       options, requests, plans
      [hpp:op]         reductions
      [hpp:coll]       collectives
      [hpp:text]       strings and vectors whose sizes the receivers do not know
      [hpp:p2p]        send and receive
      [hpp:spawn]      worker processes, and functions that some ranks run first
      [hpp:memory]     buffers from idist_alloc, handles of other headers

WHAT IT IS

    Each function calls the idist.h function of the same name with the prefix idist_. The contracts
    are in idist.h: what happens across ranks, in-place rules, errors, threads. This header adds:

      errors     A failed call throws idist::error, with the status and the text of
                 idist_last_error().
      dtypes     The dtype follows from the element type. Types without a dtype do not compile.
      buffers    A buffer is anything that has data() and size(), such as std::vector, std::array,
                 std::span and idist::span, or a C array. idist::span(pointer, count) makes one.
      sizes      Buffers whose sizes do not match cause IDIST_ERR_ARG on this rank alone, before
                 anything is sent.
      values     all_reduce(1.5, idist::sum) and similar calls return the result.
      owners     Destructors free world, group, request, plan, op, dtype, memory and workers. Owners
                 cannot be copied, only moved.

    C and C++ mix freely: an owner's get() returns the handle for idist.h, and options::get()
    returns an idist_opts. Qualify the names: with `using namespace idist`, abort() and others would
    be ambiguous.

ERRORS AND DESTRUCTORS

    No destructor throws. An error in a destructor is lost, so call wait() and finalize() yourself.
    A destructor waits for an operation until the deadline of the call.

    An operation must be complete when its request is destroyed, because the buffers may be gone
    afterwards. Usually the destructor waits. But if an exception unwinds the stack, the operation
    may be waiting for ranks that wait for this rank. If the operation is not complete, the
    destructor therefore calls idist_abort for the operation's group, which ends the calls of all
    ranks with IDIST_ERR_ABORTED. A world that an exception destroys is aborted, too. Thus an
    exception on one rank is an error on all ranks, and no rank hangs.

    To keep the group, catch the exception while the request still exists, and wait for the request.

    Exceptions do not cross the functions of idist.h, which are C. This header catches the
    exceptions that your callables throw, and turns them into errors. If the implementation of
    idist.h is compiled as C++, an exception in a reduction fails the call on all ranks with
    IDIST_ERR_CALLBACK. If the implementation is compiled as C, the exception ends the process
    through std::terminate.

COST

    A call costs a few comparisons more than in C, and allocates nothing. Only these allocate:
    functions that return or resize a std::vector or std::string, and workers, op, group, plan and
    memory. With more than 64 requests, wait_all and wait_any allocate, too.

BUILD

    C++11 or later; gcc, clang, nvcc. Exceptions must be enabled; a program without exceptions uses
    idist.h.
*/
#ifndef IDIST_HPP
#define IDIST_HPP

#include "idist.h"

#if IDIST_VERSION_MAJOR != 0 || IDIST_VERSION_MINOR != 2 || IDIST_VERSION_PATCH != 0
#error "idist.hpp is version 0.2.0, but idist.h is not: copy both from one release"
#endif

#if !defined(__cpp_exceptions) && !defined(__EXCEPTIONS) && !defined(_CPPUNWIND)
#error "idist.hpp reports errors by exceptions: with -fno-exceptions include idist.h instead"
#endif

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#if __cplusplus >= 201703L
#define IDIST_NODISCARD [[nodiscard]]
#else
#define IDIST_NODISCARD
#endif

namespace idist {

//------------------------------------------------------------------------------
// [hpp:error]  exceptions
//------------------------------------------------------------------------------

// The exception that a failed call throws. what() returns the text of idist_last_error():
// operation, ranks, cause, and what to do about it.
class error : public std::runtime_error {
  public:
    error(idist_status status, const std::string &text)
        : std::runtime_error(text), status_(status) {}

    idist_status status() const noexcept { return status_; }

    // Returns the name of the status, such as "IDIST_ERR_TIMEOUT".
    const char *name() const noexcept { return idist_status_name(status_); }

    // Returns true for an error that ends a group: all ranks of the group get the error, and the
    // group cannot be used again. But if a receive has timed out, its group remains usable.
    bool ends_group() const noexcept {
        return status_ == IDIST_ERR_PEER_LOST || status_ == IDIST_ERR_MISMATCH ||
               status_ == IDIST_ERR_TIMEOUT || status_ == IDIST_ERR_ABORTED;
    }

  private:
    idist_status status_;
};

// The exception that spawn, parallel_run and workers throw if a worker failed. The report says
// which worker failed, and how. If no worker has run, these functions throw error.
class worker_error : public error {
  public:
    worker_error(idist_status status, const std::string &text, const idist_report &report)
        : error(status, text), report_(report) {}

    const idist_report &report() const noexcept { return report_; }

  private:
    idist_report report_;
};

// Throws error unless the status is IDIST_OK. Meant for C++ programs that call functions of
// idist.h.
inline void check(idist_status status) {
    if (status != IDIST_OK) throw error(status, idist_last_error());
}

//------------------------------------------------------------------------------
// [hpp:dtype]  element types
//------------------------------------------------------------------------------

// Floating-point formats as bits, for programs whose compiler has no types for them. Collectives
// compute in these formats; for conversions, use another library. Types that the compiler provides
// can be elements as they are: float16_t and bfloat16_t of C++23, and _Float16. So can the types of
// cuda_fp16.h, cuda_bf16.h and cuda_fp8.h, if these headers are included before this one.
struct float16 {
    std::uint16_t bits;
};

struct bfloat16 {
    std::uint16_t bits;
};

struct float8_e4m3 {
    std::uint8_t bits;
};

struct float8_e5m2 {
    std::uint8_t bits;
};

// The dtype of T. A program may specialize this template for a type that has the bits of a built-in
// dtype,
//
//     template <> struct idist::dtype_traits<my_half> : idist::dtype_is<IDIST_F16> {};
//
// or for a struct, with a function that returns the value of an idist::dtype:
//
//     template <> struct idist::dtype_traits<particle> {
//         static idist_dtype value() { return particle_dtype.get(); }
//     };
template <class T> struct dtype_traits {};

// A base class for such specializations.
template <idist_dtype D> struct dtype_is {
    static constexpr idist_dtype value() noexcept { return D; }
};

namespace detail {

constexpr idist_dtype integer_dtype(std::size_t nbytes, bool is_signed) noexcept {
    return nbytes == 1   ? (is_signed ? IDIST_I8 : IDIST_U8)
           : nbytes == 2 ? (is_signed ? IDIST_I16 : IDIST_U16)
           : nbytes == 4 ? (is_signed ? IDIST_I32 : IDIST_U32)
                         : (is_signed ? IDIST_I64 : IDIST_U64);
}

template <class T>
struct integer_traits : dtype_is<integer_dtype(sizeof(T), std::is_signed<T>::value)> {};

template <class...> struct make_void { typedef void type; };

// Is true if dtype_traits<T> has a value().
template <class T, class = void> struct has_dtype : std::false_type {};
template <class T>
struct has_dtype<T, typename make_void<decltype(dtype_traits<T>::value())>::type> : std::true_type {
};

} // namespace detail

// The dtype of bool is U8. The dtype of char is I8 on every machine, as in IDIST_DTYPE.
template <> struct dtype_traits<bool> : dtype_is<IDIST_U8> {};
template <> struct dtype_traits<char> : dtype_is<IDIST_I8> {};
template <> struct dtype_traits<signed char> : dtype_is<IDIST_I8> {};
template <> struct dtype_traits<unsigned char> : dtype_is<IDIST_U8> {};
template <> struct dtype_traits<short> : detail::integer_traits<short> {};
template <> struct dtype_traits<unsigned short> : detail::integer_traits<unsigned short> {};
template <> struct dtype_traits<int> : detail::integer_traits<int> {};
template <> struct dtype_traits<unsigned> : detail::integer_traits<unsigned> {};
template <> struct dtype_traits<long> : detail::integer_traits<long> {};
template <> struct dtype_traits<unsigned long> : detail::integer_traits<unsigned long> {};
template <> struct dtype_traits<long long> : detail::integer_traits<long long> {};
template <> struct dtype_traits<unsigned long long> : detail::integer_traits<unsigned long long> {};
template <> struct dtype_traits<wchar_t> : detail::integer_traits<wchar_t> {};
template <> struct dtype_traits<char16_t> : dtype_is<IDIST_U16> {};
template <> struct dtype_traits<char32_t> : dtype_is<IDIST_U32> {};
#ifdef __cpp_char8_t
template <> struct dtype_traits<char8_t> : dtype_is<IDIST_U8> {};
#endif
#ifdef __cpp_lib_byte
template <> struct dtype_traits<std::byte> : dtype_is<IDIST_U8> {};
#endif
template <> struct dtype_traits<float> : dtype_is<IDIST_F32> {};
template <> struct dtype_traits<double> : dtype_is<IDIST_F64> {};
template <> struct dtype_traits<float16> : dtype_is<IDIST_F16> {};
template <> struct dtype_traits<bfloat16> : dtype_is<IDIST_BF16> {};
template <> struct dtype_traits<float8_e4m3> : dtype_is<IDIST_F8E4M3> {};
template <> struct dtype_traits<float8_e5m2> : dtype_is<IDIST_F8E5M2> {};
template <> struct dtype_traits<idist_f32_i64> : dtype_is<IDIST_F32_I64> {};
template <> struct dtype_traits<idist_f64_i64> : dtype_is<IDIST_F64_I64> {};
template <> struct dtype_traits<idist_i32_i64> : dtype_is<IDIST_I32_I64> {};
template <> struct dtype_traits<idist_i64_i64> : dtype_is<IDIST_I64_I64> {};
#if defined(__STDCPP_FLOAT16_T__) || (defined(__FLT16_MAX__) && !defined(__CUDACC__) && \
                                      (!defined(__clang__) || __clang_major__ > 14))
namespace detail {
__extension__ typedef _Float16 native_float16;
}
template <> struct dtype_traits<detail::native_float16> : dtype_is<IDIST_F16> {};
#endif
#ifdef __STDCPP_BFLOAT16_T__
template <> struct dtype_traits<decltype(0.0bf16)> : dtype_is<IDIST_BF16> {};
#endif
#ifdef __CUDA_FP16_TYPES_EXIST__
template <> struct dtype_traits<::__half> : dtype_is<IDIST_F16> {};
#endif
#ifdef __CUDA_BF16_TYPES_EXIST__
template <> struct dtype_traits<::__nv_bfloat16> : dtype_is<IDIST_BF16> {};
#endif
#ifdef __CUDA_FP8_TYPES_EXIST__
template <> struct dtype_traits<::__nv_fp8_e4m3> : dtype_is<IDIST_F8E4M3> {};
template <> struct dtype_traits<::__nv_fp8_e5m2> : dtype_is<IDIST_F8E5M2> {};
#endif

// Returns the dtype of T without const and volatile; a constant expression for built-in dtypes.
template <class T> constexpr idist_dtype dtype_of() {
    typedef typename std::remove_cv<T>::type element;
    static_assert(detail::has_dtype<element>::value,
                  "idist: this type has no dtype. Elements are numbers, bool, characters, the "
                  "structs float16, bfloat16, ... and idist_f32_i64, ...; for others specialize "
                  "idist::dtype_traits");
    static_assert(std::is_trivially_copyable<element>::value,
                  "idist: elements are sent as bytes, so their type must be trivially copyable");
    return dtype_traits<element>::value();
}

//------------------------------------------------------------------------------
// [hpp:span]  buffers
//------------------------------------------------------------------------------

namespace detail {

template <class T, class U>
struct same_elements : std::integral_constant<bool, std::is_convertible<U (*)[], T (*)[]>::value> {
};

// The type that a container's data() points to. Other types, such as std::vector<bool>, have none.
template <class C, class = void> struct container_pointee {};
template <class C>
struct container_pointee<
    C, typename std::enable_if<
           std::is_pointer<decltype(std::declval<C &>().data())>::value &&
           !std::is_void<
               typename std::remove_pointer<decltype(std::declval<C &>().data())>::type>::value &&
           std::is_convertible<decltype(std::declval<C &>().size()), std::size_t>::value>::type> {
    typedef typename std::remove_pointer<decltype(std::declval<C &>().data())>::type type;
};

// The element type of a container or an array.
template <class C> struct pointee : container_pointee<C> {};
template <class T, std::size_t N> struct pointee<T[N]> { typedef T type; };

} // namespace detail

// A non-owning view of contiguous elements, like std::span of C++20. The type is the same in every
// version of C++, so the files of a program may be compiled for different versions.
template <class T> class span {
  public:
    typedef T element_type;
    typedef typename std::remove_cv<T>::type value_type;

    constexpr span() noexcept : data_(nullptr), size_(0) {}
    constexpr span(T *data, std::size_t size) noexcept : data_(data), size_(size) {}
    template <std::size_t N>
    constexpr span(T (&array)[N]) noexcept : data_(array), size_(N) {} // NOLINT: converts
    template <class C, class U = typename detail::container_pointee<C>::type,
              class = typename std::enable_if<detail::same_elements<T, U>::value>::type>
    constexpr span(C &container) noexcept // NOLINT: converts
        : data_(container.data()), size_(container.size()) {}
    template <class C, class U = typename detail::container_pointee<const C>::type,
              class = typename std::enable_if<detail::same_elements<T, U>::value>::type>
    constexpr span(const C &container) noexcept // NOLINT: converts
        : data_(container.data()), size_(container.size()) {}

    constexpr T *data() const noexcept { return data_; }
    constexpr std::size_t size() const noexcept { return size_; }
    constexpr bool empty() const noexcept { return size_ == 0; }
    constexpr T *begin() const noexcept { return data_; }
    constexpr T *end() const noexcept { return data_ + size_; }
    constexpr T &operator[](std::size_t i) const { return data_[i]; }

    // Returns the part of count elements that begins at element `first`.
    constexpr span subspan(std::size_t first, std::size_t count) const {
        return span(data_ + first, count);
    }

  private:
    T *data_;
    std::size_t size_;
};

// Returns span<T>(data, size). Needed where C++ does not deduce the T of a class, as before C++17.
template <class T> constexpr span<T> make_span(T *data, std::size_t size) noexcept {
    return span<T>(data, size);
}

namespace detail {

// Element type and span type of a buffer B, which may be a reference. A value has neither.
template <class B, class = void> struct buffer : std::false_type {};
template <class B>
struct buffer<
    B, typename make_void<typename pointee<typename std::remove_reference<B>::type>::type>::type>
    : std::true_type {
    typedef typename pointee<typename std::remove_reference<B>::type>::type pointed;
    typedef typename std::remove_cv<pointed>::type element;
    typedef span<pointed> view;
};

template <class B> using element = typename buffer<B>::element;
template <class B> using view = typename buffer<B>::view;
template <class B> using if_buffer = typename std::enable_if<buffer<B>::value>::type;
template <class A, class B>
using if_buffers = typename std::enable_if<buffer<A>::value && buffer<B>::value>::type;
template <class T>
using if_value = typename std::enable_if<!buffer<T>::value && !std::is_pointer<T>::value>::type;

// The type T, in a parameter from which the compiler must not deduce T.
template <class T> struct same { typedef T type; };
template <class T> using identity = typename same<T>::type;

// Is true if a buffer passed as B is destroyed after the call: B is a temporary that owns its
// elements. A type that can be copied byte by byte, such as a span, does not own its elements.
template <class B>
struct is_temporary
    : std::integral_constant<
          bool, !std::is_lvalue_reference<B>::value &&
                    !std::is_trivially_copyable<typename std::remove_reference<B>::type>::value> {};

template <class R> void check_receives() {
    static_assert(!std::is_const<typename buffer<R>::pointed>::value,
                  "idist: the call writes to this buffer, but its elements are const");
    static_assert(!is_temporary<R>::value,
                  "idist: the call writes to this buffer, but it is a temporary");
}

template <class S, class R> void check_same() {
    static_assert(std::is_same<element<S>, element<R>>::value,
                  "idist: the elements of the two buffers have different types");
}

} // namespace detail

//------------------------------------------------------------------------------
// [hpp:life]  worlds and groups
//------------------------------------------------------------------------------

namespace detail {

// Returns the number of uncaught exceptions in this thread; before C++17, 0 or 1.
inline int exceptions() noexcept {
#if defined(__cpp_lib_uncaught_exceptions) || __cplusplus >= 201703L
    return std::uncaught_exceptions();
#else
    return std::uncaught_exception() ? 1 : 0;
#endif
}

// Converts to true in the destructor of its owner if an exception destroys the owner.
class unwinding {
  public:
    unwinding() noexcept : before_(exceptions()) {}
    explicit operator bool() const noexcept { return exceptions() > before_; }

  private:
    int before_;
};

} // namespace detail

inline int rank() noexcept { return idist_get_rank(); } // of the caller in the default world
inline int world_size() noexcept { return idist_get_world_size(); }
inline int local_rank() noexcept { return idist_get_local_rank(); }

// A world that this process, or this thread, joins in the constructor and leaves in the destructor.
// Groups, requests, plans and ops of the world must be destroyed first, so declare them after the
// world.
//
// The destructor waits until the other ranks leave as well. If an exception destroys the world, the
// destructor aborts the world first, so that no rank waits. The destructor reports no errors;
// finalize() throws them.
class world {
  public:
    // Joins the default world by calling idist_initialize.
    explicit world(const idist_desc &desc = idist_desc()) : group_(nullptr), open_(false) {
        check(idist_initialize(&desc));
        open_ = true;
    }

    // Joins another, independent world by calling idist_open.
    static world open(const idist_desc &desc) {
        world opened(nullptr);

        check(idist_open(&desc, &opened.group_));
        opened.open_ = true;
        return opened;
    }

    world(world &&other) noexcept : group_(other.group_), open_(other.open_) {
        other.group_ = nullptr;
        other.open_ = false;
    }
    world &operator=(world &&) = delete;

    ~world() {
        if (!open_) return;
        if (unwinding_) idist_abort(group_);
        leave();
    }

    // Leaves the world by calling idist_finalize or idist_close. After an error the world is gone,
    // too, unless the error is IDIST_ERR_STATE, which means that a request is still pending.
    void finalize() {
        if (open_) check(leave());
    }

    int rank() const noexcept { return idist_group_rank(group_); }
    int size() const noexcept { return idist_group_size(group_); }
    void abort() const { check(idist_abort(group_)); }

    // Returns the group of all ranks, or nullptr for the default world.
    idist_group *get() const noexcept { return group_; }

  private:
    explicit world(std::nullptr_t) noexcept : group_(nullptr), open_(false) {}

    idist_status leave() noexcept {
        const idist_status status = group_ ? idist_close(&group_) : idist_finalize();

        if (status != IDIST_ERR_STATE) open_ = false;
        return status;
    }

    idist_group *group_;
    bool open_;
    detail::unwinding unwinding_;
};

class any_group;

// A group of some ranks of a world. A rank that is not a member has the group, too, with a rank of
// -1. The destructor does not wait for other ranks. If a request on the group is pending, or if the
// world has ended, the destructor does nothing. In these cases, the world will free the group, or
// has already freed it.
class group {
  public:
    group() noexcept : group_(nullptr) {}
    explicit group(idist_group *handle) noexcept : group_(handle) {} // takes ownership
    group(group &&other) noexcept : group_(other.release()) {}
    group &operator=(group &&other) noexcept {
        if (this != &other) reset(other.release());
        return *this;
    }
    ~group() { reset(nullptr); }

    int rank() const noexcept { return group_ ? idist_group_rank(group_) : -1; }
    int size() const noexcept { return group_ ? idist_group_size(group_) : 0; }
    bool is_member() const noexcept { return rank() >= 0; }

    // Returns the rank in `to` of this group's rank `rank`, or -1. If `to` is nullptr, the default
    // world is meant.
    int translate(int rank, const idist_group *to) const noexcept {
        return idist_group_translate(group_, rank, to);
    }

    void abort() const { check(idist_abort(group_)); }

    // Creates a group of the live members after the loss of a rank. Collective over the live
    // members.
    group shrink() const {
        group survivors;

        check(idist_shrink(group_, &survivors.group_));
        return survivors;
    }

    // Returns the bitwise AND of `flag` over all live members, even in a group that has failed.
    int agree(int flag) const {
        check(idist_agree(group_, &flag));
        return flag;
    }

    // Returns the handle, or nullptr if this object has no group, for example because it was moved
    // from. In a call, nullptr would mean the default world, so options refuse such an object.
    idist_group *get() const noexcept { return group_; }
    explicit operator bool() const noexcept { return group_ != nullptr; }

    // Releases and returns the handle, for idist_free_group.
    idist_group *release() noexcept {
        idist_group *handle = group_;

        group_ = nullptr;
        return handle;
    }

  private:
    void reset(idist_group *handle) noexcept {
        if (group_) idist_free_group(&group_);
        group_ = handle;
    }

    idist_group *group_;

    friend group new_group(span<const int>);
    friend group new_group_by_members(any_group, span<const int>, int);
    friend group split(int, int, any_group);
};

// A group or world of idist.h or idist.hpp; by default, the default world.
class any_group {
  public:
    any_group(idist_group *handle = nullptr) noexcept : group_(handle) {} // NOLINT: converts
    any_group(const world &w) noexcept : group_(w.get()) {}               // NOLINT: converts
    any_group(const group &g) : group_(g.get()) {                         // NOLINT: converts
        if (!g)
            throw error(IDIST_ERR_ARG,
                        "idist::group: no group: the object was moved from or never set");
    }

    idist_group *get() const noexcept { return group_; }

  private:
    idist_group *group_;
};

// Ends all pending and later calls on the group, on all its ranks.
inline void abort(any_group g = any_group()) { check(idist_abort(g.get())); }

// Creates a group of the listed ranks of the default world. Collective over the world.
IDIST_NODISCARD inline group new_group(span<const int> ranks) {
    group made;

    check(idist_new_group(ranks.data(), static_cast<int>(ranks.size()), &made.group_));
    return made;
}

// Creates a group of the listed ranks of parent, in this order. Only the listed ranks make this
// call.
IDIST_NODISCARD inline group new_group_by_members(any_group parent, span<const int> ranks,
                                                  int tag) {
    group made;

    check(idist_new_group_by_members(parent.get(), ranks.data(), static_cast<int>(ranks.size()),
                                     tag, &made.group_));
    return made;
}

// Creates a group for each color >= 0, ordered by key, then by rank in parent. Collective over
// parent.
IDIST_NODISCARD inline group split(int color, int key = 0, any_group parent = any_group()) {
    group made;

    check(idist_split(parent.get(), color, key, &made.group_));
    return made;
}

//------------------------------------------------------------------------------
// [hpp:call]  options, requests, plans
//------------------------------------------------------------------------------

class request;

// The options of a call: the last argument of every communication call. Each of these arguments
// converts to options:
//
//     idist::barrier();                        the default world, blocking, the group's time-out
//     idist::barrier(group);                   a group or a world
//     idist::barrier(std::chrono::seconds(5)); a time-out
//     idist::barrier(request);                 returns at once; request.wait() completes the call
//     idist::barrier(idist::options(group).timeout(std::chrono::seconds(5)).into(request));
class options {
  public:
    options() noexcept : c_(), request_(nullptr) {}
    options(idist_group *group) noexcept : options() { c_.group = group; }    // NOLINT: converts
    options(any_group group) noexcept : options() { c_.group = group.get(); } // NOLINT: converts
    options(const idist::group &group) : options(any_group(group)) {}         // NOLINT: converts
    options(const world &w) noexcept : options(any_group(w)) {}               // NOLINT: converts
    options(idist::request &r) noexcept : options() { request_ = &r; }        // NOLINT: converts
    template <class Rep, class Period>
    options(std::chrono::duration<Rep, Period> time) noexcept : options() { // NOLINT: converts
        timeout(time);
    }
    // Rejects a rank where the options belong: all_gather(x, y, 0) has no root.
    options(int) = delete;
    options(bool) = delete;

    // Sets the deadline of the call (0 means the deadline of the world, a negative time means
    // none). A fraction of a millisecond counts as a whole millisecond.
    template <class Rep, class Period>
    options &timeout(std::chrono::duration<Rep, Period> time) noexcept {
        typedef std::chrono::duration<double, std::milli> exact;
        const double ms = std::chrono::duration_cast<exact>(time).count();
        const double most = std::numeric_limits<int>::max();

        c_.timeout_ms = ms < 0 ? -1 : static_cast<int>(ms < most ? ms : most);
        if (ms > c_.timeout_ms && ms < most) c_.timeout_ms++;
        return *this;
    }

    // Makes the call return at once; r completes the call.
    options &into(idist::request &r) noexcept {
        request_ = &r;
        return *this;
    }

    // Sets the stream for device buffers, a cudaStream_t.
    options &stream(void *cuda_stream) noexcept {
        c_.stream = cuda_stream;
        return *this;
    }

    idist_group *group() const noexcept { return c_.group; }
    bool is_deferred() const noexcept { return request_ || c_.plan; }

    // Returns the options for a call of idist.h. If there is a request, the request completes that
    // call.
    idist_opts get() const;

  private:
    idist_opts c_;
    idist::request *request_;

    friend class plan;
};

// An operation in flight. The program must not touch the buffers until wait() returns or throws, or
// test() returns true. The buffers must outlive the request, so declare the request after the
// buffers.
//
// The destructor waits for the operation. If an exception destroys the request before the operation
// is complete, the destructor aborts the group of the call (see ERRORS AND DESTRUCTORS). Move
// assignment treats the request's old operation in the same way.
class request {
  public:
    request() noexcept : request_(), group_(nullptr) {}
    request(request &&other) noexcept : request_(other.request_), group_(other.group_) {
        other.request_ = idist_request();
    }
    request &operator=(request &&other) noexcept {
        if (this == &other) return *this;
        finish();
        request_ = other.request_;
        group_ = other.group_;
        other.request_ = idist_request();
        return *this;
    }
    ~request() { finish(); }

    // Blocks until the operation is complete, and throws if it failed. Returns at once if the
    // request is empty.
    void wait() { check(idist_wait(&request_)); }

    // Returns true if the operation is complete. Does not block. Throws if the operation failed.
    bool test() {
        bool done = false;

        check(idist_test(&request_, &done));
        return done;
    }

    // Returns false if there is nothing to wait for.
    bool is_pending() const noexcept { return request_.impl != nullptr; }

    // Detaches the operation by idist_request_free. Its buffers must stay valid.
    void detach() { check(idist_request_free(&request_)); }

    // Returns the request for idist_wait_stream and other functions of idist.h.
    idist_request *get() noexcept { return &request_; }

  private:
    void finish() noexcept {
        bool done = false;

        if (is_pending() && unwinding_) {
            idist_test(&request_, &done);
            if (is_pending()) idist_abort(group_);
        }
        if (is_pending()) idist_wait(&request_);
    }

    idist_request request_;
    idist_group *group_;
    detail::unwinding unwinding_;

    friend class options;
};

inline idist_opts options::get() const {
    idist_opts c = c_;

    if (!request_) return c;
    if (request_->is_pending())
        throw error(
            IDIST_ERR_STATE,
            "idist::request: the previous operation of the request is not complete: wait for it "
            "before you reuse the request");
    request_->group_ = c.group;
    c.request = request_->get();
    return c;
}

namespace detail {

// An array of pointers to requests. Up to 64 requests need no allocation.
class request_pointers {
  public:
    request_pointers(request *requests, std::size_t n) : pointers_(few_) {
        if (n > sizeof few_ / sizeof few_[0]) {
            many_.resize(n);
            pointers_ = many_.data();
        }
        for (std::size_t i = 0; i < n; i++) pointers_[i] = requests[i].get();
    }
    request_pointers(const request_pointers &) = delete;
    request_pointers &operator=(const request_pointers &) = delete;
    idist_request *const *get() const noexcept { return pointers_; }

  private:
    idist_request *few_[64];
    std::vector<idist_request *> many_;
    idist_request **pointers_;
};

} // namespace detail

// Waits for all requests, even after a failure, and throws the failure with the lowest index.
inline void wait_all(span<request> requests) {
    const detail::request_pointers pointers(requests.data(), requests.size());

    check(idist_wait_all_of(pointers.get(), requests.size()));
}

// Waits until one of the requests is complete and returns its index, or requests.size() if all are
// empty.
inline std::size_t wait_any(span<request> requests) {
    const detail::request_pointers pointers(requests.data(), requests.size());
    std::size_t index = 0;

    check(idist_wait_any_of(pointers.get(), requests.size(), &index));
    return index;
}

// A call that is prepared once and made many times. The callable gets options and makes one call
// with them. At this point the call is checked, but not started:
//
//     idist::plan step([&](const idist::options &o) { idist::all_reduce(x, idist::sum, o); },
//                      group);
//     for (...) step.start();
//
// The buffers must outlive the plan. Calls with values and strings cannot be planned.
class plan {
  public:
    template <class F> explicit plan(F &&call, options with = options()) : plan_(nullptr) {
        check(idist_plan_create(&plan_));
        with.request_ = nullptr;
        with.c_.plan = plan_;
        group_ = with.group();
        try {
            call(static_cast<const options &>(with));
        } catch (...) {
            idist_plan_free(&plan_);
            throw;
        }
    }
    plan(plan &&other) noexcept : plan_(other.plan_), group_(other.group_) {
        other.plan_ = nullptr;
    }
    plan &operator=(plan &&other) noexcept {
        std::swap(plan_, other.plan_);
        std::swap(group_, other.group_);
        return *this;
    }
    ~plan() {
        if (plan_) idist_plan_free(&plan_);
    }

    // Makes the call and waits for it.
    void start() const { check(idist_plan_start(plan_, nullptr)); }

    // Makes the call and returns at once; r completes the call.
    void start(request &r) const {
        const idist_opts c = options(group_).into(r).get();

        check(idist_plan_start(plan_, c.request));
    }

    const idist_plan *get() const noexcept { return plan_; }

  private:
    idist_plan *plan_;
    idist_group *group_;
};

namespace detail {

// Returns the number of nested calls of together() that this thread is in. Communication calls
// inside together() complete later.
inline int &together_depth() noexcept {
    static thread_local int depth = 0;
    return depth;
}

} // namespace detail

// Runs f, whose calls start at once and complete together when f returns. Exchanges that would
// deadlock one by one therefore work. f must not make a call that returns a value. If f throws,
// `group` is aborted, which ends the calls that f has made on it. The exception is then rethrown.
template <class F> void together(F &&f, any_group group = any_group()) {
    check(idist_group_begin());
    detail::together_depth()++;
    try {
        f();
    } catch (...) {
        detail::together_depth()--;
        idist_abort(group.get());
        idist_group_end();
        throw;
    }
    detail::together_depth()--;
    check(idist_group_end());
}

//------------------------------------------------------------------------------
// [hpp:op]  reductions
//------------------------------------------------------------------------------

// How elements are combined; see idist_op. The sum of bool is an error: use lor, or count in an
// int.
constexpr idist_op sum = IDIST_SUM;
constexpr idist_op prod = IDIST_PROD;
constexpr idist_op min = IDIST_MIN;
constexpr idist_op max = IDIST_MAX;
constexpr idist_op avg = IDIST_AVG;
constexpr idist_op band = IDIST_BAND;
constexpr idist_op bor = IDIST_BOR;
constexpr idist_op bxor = IDIST_BXOR;
constexpr idist_op land = IDIST_LAND;
constexpr idist_op lor = IDIST_LOR;
constexpr idist_op lxor = IDIST_LXOR;
constexpr idist_op minloc = IDIST_MINLOC;
constexpr idist_op maxloc = IDIST_MAXLOC;

// A reduction of T by a callable, T f(const T &lower, const T &higher). `lower` is the operand of
// the lower ranks. The callable must be associative.
//
//     idist::op<float> larger([](float a, float b) { return a < b ? b : a; });
//     idist::all_reduce(x, larger);
//
// All ranks of the world of `group` must create their ops in the same order. The callable runs in
// any thread that is inside idist, possibly in several at once, and must not call idist. An
// exception in the callable fails the call with IDIST_ERR_CALLBACK, or ends the process: see the
// head of this file. The op must outlive the requests and plans that use it, and be destroyed
// before the world ends.
template <class T> class op {
  public:
    template <class F>
    explicit op(F f, bool is_commutative = true, any_group group = any_group())
        : op_(IDIST_OP_USER), group_(group.get()) {
        std::unique_ptr<state> made(new state_of<F>(std::move(f)));

        check(idist_op_create(&state_of<F>::run, static_cast<state_of<F> *>(made.get()),
                              is_commutative, group_, &op_));
        state_ = std::move(made);
    }
    op(op &&other) noexcept
        : op_(other.op_), group_(other.group_), state_(std::move(other.state_)) {}
    op &operator=(op &&) = delete;
    ~op() {
        if (state_) idist_op_free(op_, group_);
    }

    // Creates an op for the SUM of factor * x, with each rank's own factor. Floating-point dtypes
    // only.
    static op premul_sum(double factor, any_group group = any_group()) {
        op made(group.get());

        check(idist_op_create_premul_sum(factor, group.get(), &made.op_));
        made.state_.reset(new state);
        return made;
    }

    idist_op get() const noexcept { return op_; }

  private:
    struct state {
        virtual ~state() {}
    };

    template <class F> struct state_of : state {
        explicit state_of(F &&callable) : f(std::move(callable)) {}

        // Applies f to count elements, which need not be aligned. idist.h handles exceptions.
        static void run(const void *in, void *inout, std::size_t count, idist_dtype, void *arg) {
            F &f = static_cast<state_of *>(arg)->f;
            const unsigned char *from = static_cast<const unsigned char *>(in);
            unsigned char *to = static_cast<unsigned char *>(inout);
            T lower, higher;

            for (std::size_t i = 0; i < count * sizeof(T); i += sizeof(T)) {
                std::memcpy(&lower, from + i, sizeof(T));
                std::memcpy(&higher, to + i, sizeof(T));
                higher = f(static_cast<const T &>(lower), static_cast<const T &>(higher));
                std::memcpy(to + i, &higher, sizeof(T));
            }
        }

        F f;
    };

    explicit op(idist_group *group) noexcept : op_(IDIST_OP_USER), group_(group) {}

    idist_op op_;
    idist_group *group_;
    std::unique_ptr<state> state_;
};

// The reduction of a call on elements of type T: a built-in reduction, or an op<T>.
template <class T> class reduction {
  public:
    reduction(idist_op value) noexcept : value_(value) {}         // NOLINT: converts
    reduction(const op<T> &user) noexcept : value_(user.get()) {} // NOLINT: converts
    idist_op get() const {
        // The sum of two true values is not a bool.
        if (std::is_same<T, bool>::value && value_ == IDIST_SUM)
            throw error(IDIST_ERR_ARG, "SUM of bool: use LOR, or count in an int");
        return value_;
    }

  private:
    idist_op value_;
};

namespace detail {

template <class T> using reduction_of = reduction<identity<T>>;

} // namespace detail

// A dtype for elements that are structs, for dtype_traits. All ranks of the world of `group` must
// create their dtypes in the same order. The dtype must be destroyed before the world ends.
class dtype {
  public:
    dtype(std::size_t nbytes, const char *name, any_group group = any_group())
        : group_(group.get()) {
        check(idist_dtype_create(nbytes, name, group_, &dtype_));
        owns_ = true;
    }
    dtype(dtype &&other) noexcept : dtype_(other.dtype_), group_(other.group_), owns_(other.owns_) {
        other.owns_ = false;
    }
    dtype &operator=(dtype &&) = delete;
    ~dtype() {
        if (owns_) idist_dtype_free(dtype_, group_);
    }

    idist_dtype get() const noexcept { return dtype_; }

  private:
    idist_dtype dtype_;
    idist_group *group_;
    bool owns_;
};

//------------------------------------------------------------------------------
// [hpp:coll]  collectives
//
// All ranks of the group make the same calls, in the same order. In the rules, n is the number of
// ranks in the group, and r is the caller's rank. "send" and "recv" are buffers whose sizes are
// given for each function. Other sizes throw error with IDIST_ERR_ARG before anything is sent, and
// the group remains usable. The forms with one buffer work in place. The forms that take a value
// return the result; they always block and cannot be planned.

namespace detail {

[[noreturn]] inline void fail_size(const char *call, const char *what, std::size_t got,
                                   std::size_t expected, const char *why) {
    throw error(IDIST_ERR_ARG, std::string(call) + ": " + what + " has " + std::to_string(got) +
                                   " elements, expected " + std::to_string(expected) + ", " + why);
}

inline void check_size(const char *call, const char *what, std::size_t got, std::size_t expected,
                       const char *why) {
    if (got != expected) fail_size(call, what, got, expected, why);
}

inline void check_blocks(const char *call, const options &o) {
    if (o.is_deferred() || together_depth())
        throw error(IDIST_ERR_ARG, std::string(call) +
                                       ": a call that returns a value blocks: it takes no "
                                       "request, and is in no plan and not in together");
}

template <class S> void check_outlives(const char *call, const options &o) {
    if (is_temporary<S>::value && (o.is_deferred() || together_depth()))
        throw error(IDIST_ERR_ARG, std::string(call) + ": the send buffer is a temporary, which "
                                                       "is gone before the operation is complete");
}

// Checks the buffers S, which is sent, and R, which is written to.
template <class S, class R> void check_buffers(const char *call, const options &o) {
    check_receives<R>();
    check_same<S, R>();
    check_outlives<S>(call, o);
}

inline std::size_t ranks_of(const options &o) noexcept {
    const int n = idist_group_size(o.group());

    return n > 0 ? static_cast<std::size_t>(n) : 1;
}

inline bool is_root(int root, const options &o) noexcept {
    return idist_group_rank(o.group()) == root;
}

// Returns the end of a v-form's last block, in elements.
inline std::size_t end_of(span<const std::size_t> counts, span<const std::size_t> displs) {
    std::size_t end = 0, at = 0;

    for (std::size_t i = 0; i < counts.size(); i++) {
        const std::size_t begin = displs.empty() ? at : displs[i];

        at = begin + counts[i];
        if (counts[i] && at > end) end = at;
    }
    return end;
}

// Checks that counts and displs have an entry for each rank, and that their blocks lie within the
// buffer.
inline void check_v(const char *call, std::size_t size, span<const std::size_t> counts,
                    span<const std::size_t> displs, const options &o) {
    check_size(call, "counts", counts.size(), ranks_of(o), "the number of ranks");
    if (!displs.empty())
        check_size(call, "displs", displs.size(), counts.size(), "as many as counts");
    if (end_of(counts, displs) > size)
        fail_size(call, "the buffer", size, end_of(counts, displs),
                  "or more: the last block ends "
                  "there");
}

} // namespace detail

// recv[i] = op over all ranks of send[i]. Sizes: send == recv.
template <class S, class R, class = detail::if_buffers<S, R>>
void all_reduce(S &&send, R &&recv, reduction<detail::element<S>> op,
                const options &o = options()) {
    const detail::view<S> from(send);
    const detail::view<R> to(recv);

    detail::check_buffers<S, R>("all_reduce", o);
    detail::check_size("all_reduce", "recv", to.size(), from.size(), "as many as send");
    const idist_opts c = o.get();
    check(idist_all_reduce(from.data(), to.data(), from.size(), dtype_of<detail::element<S>>(),
                           op.get(), &c));
}

template <class B, class = detail::if_buffer<B>>
void all_reduce(B &&inout, reduction<detail::element<B>> op, const options &o = options()) {
    const detail::view<B> both(inout);

    detail::check_receives<B>();
    all_reduce(both, both, op, o);
}

template <class T, class = detail::if_value<T>>
IDIST_NODISCARD T all_reduce(T value, detail::reduction_of<T> op, const options &o = options()) {
    detail::check_blocks("all_reduce", o);
    all_reduce(span<T>(&value, 1), op, o);
    return value;
}

// recv[i] = op over all ranks of send[i], on root only. Sizes: send == recv on root; on other ranks
// recv is ignored.
template <class S, class R, class = detail::if_buffers<S, R>>
void reduce(S &&send, R &&recv, reduction<detail::element<S>> op, int root,
            const options &o = options()) {
    const detail::view<S> from(send);
    const detail::view<R> to(recv);

    detail::check_buffers<S, R>("reduce", o);
    if (detail::is_root(root, o))
        detail::check_size("reduce", "recv", to.size(), from.size(), "as many as send");
    const idist_opts c = o.get();
    check(idist_reduce(from.data(), to.data(), from.size(), dtype_of<detail::element<S>>(),
                       op.get(), root, &c));
}

// Works in place on root; on other ranks, inout is only read.
template <class B, class = detail::if_buffer<B>>
void reduce(B &&inout, reduction<detail::element<B>> op, int root, const options &o = options()) {
    const detail::view<B> both(inout);

    detail::check_receives<B>();
    reduce(both, both, op, root, o);
}

// Returns the result on root, and the rank's own value on other ranks.
template <class T, class = detail::if_value<T>>
IDIST_NODISCARD T reduce(T value, detail::reduction_of<T> op, int root,
                         const options &o = options()) {
    detail::check_blocks("reduce", o);
    reduce(span<T>(&value, 1), op, root, o);
    return value;
}

// Copies root's buf to buf on all ranks. All these buffers have the same size.
template <class B, class = detail::if_buffer<B>>
void broadcast(B &&buf, int root, const options &o = options()) {
    const detail::view<B> both(buf);

    detail::check_receives<B>();
    const idist_opts c = o.get();
    check(idist_broadcast(both.data(), both.size(), dtype_of<detail::element<B>>(), root, &c));
}

template <class T, class = detail::if_value<T>>
IDIST_NODISCARD T broadcast(T value, int root, const options &o = options()) {
    detail::check_blocks("broadcast", o);
    broadcast(span<T>(&value, 1), root, o);
    return value;
}

// Completes when all ranks have made this call.
inline void barrier(const options &o = options()) {
    const idist_opts c = o.get();

    check(idist_barrier(&c));
}

// recv[k*size + i] = send[i] of rank k. Sizes: recv == n * send.
template <class S, class R, class = detail::if_buffers<S, R>>
void all_gather(S &&send, R &&recv, const options &o = options()) {
    const detail::view<S> from(send);
    const detail::view<R> to(recv);

    detail::check_buffers<S, R>("all_gather", o);
    detail::check_size("all_gather", "recv", to.size(), from.size() * detail::ranks_of(o),
                       "send times the number of ranks");
    const idist_opts c = o.get();
    check(
        idist_all_gather(from.data(), to.data(), from.size(), dtype_of<detail::element<S>>(), &c));
}

// Returns the values of all ranks, in rank order.
template <class T, class = detail::if_value<T>>
IDIST_NODISCARD std::vector<T> all_gather(const T &value, const options &o = options()) {
    static_assert(!std::is_same<T, bool>::value,
                  "idist: std::vector<bool> has no elements in memory: gather a char");
    std::vector<T> values(detail::ranks_of(o));

    detail::check_blocks("all_gather", o);
    all_gather(span<const T>(&value, 1), values, o);
    return values;
}

// recv[k*size + i] = send[i] of rank k, on root only. Sizes: recv == n * send on root; on other
// ranks recv is ignored.
template <class S, class R, class = detail::if_buffers<S, R>>
void gather(S &&send, R &&recv, int root, const options &o = options()) {
    const detail::view<S> from(send);
    const detail::view<R> to(recv);

    detail::check_buffers<S, R>("gather", o);
    if (detail::is_root(root, o))
        detail::check_size("gather", "recv", to.size(), from.size() * detail::ranks_of(o),
                           "send times the number of ranks");
    const idist_opts c = o.get();
    check(idist_gather(from.data(), to.data(), from.size(), dtype_of<detail::element<S>>(), root,
                       &c));
}

// On root, returns the values of all ranks, in rank order. On other ranks, returns an empty vector.
template <class T, class = detail::if_value<T>>
IDIST_NODISCARD std::vector<T> gather(const T &value, int root, const options &o = options()) {
    static_assert(!std::is_same<T, bool>::value,
                  "idist: std::vector<bool> has no elements in memory: gather a char");
    std::vector<T> values(detail::is_root(root, o) ? detail::ranks_of(o) : 0);

    detail::check_blocks("gather", o);
    gather(span<const T>(&value, 1), values, root, o);
    return values;
}

// recv[i] = send[r*size + i] of root. Sizes: send == n * recv on root; on other ranks send is
// ignored.
template <class S, class R, class = detail::if_buffers<S, R>>
void scatter(S &&send, R &&recv, int root, const options &o = options()) {
    const detail::view<S> from(send);
    const detail::view<R> to(recv);

    detail::check_buffers<S, R>("scatter", o);
    if (detail::is_root(root, o))
        detail::check_size("scatter", "send", from.size(), to.size() * detail::ranks_of(o),
                           "recv times the number of ranks");
    const idist_opts c = o.get();
    check(
        idist_scatter(from.data(), to.data(), to.size(), dtype_of<detail::element<S>>(), root, &c));
}

// recv[i] = op over all ranks of send[r*size + i]. Sizes: send == n * recv.
template <class S, class R, class = detail::if_buffers<S, R>>
void reduce_scatter(S &&send, R &&recv, reduction<detail::element<S>> op,
                    const options &o = options()) {
    const detail::view<S> from(send);
    const detail::view<R> to(recv);

    detail::check_buffers<S, R>("reduce_scatter", o);
    detail::check_size("reduce_scatter", "send", from.size(), to.size() * detail::ranks_of(o),
                       "recv times the number of ranks");
    const idist_opts c = o.get();
    check(idist_reduce_scatter(from.data(), to.data(), to.size(), dtype_of<detail::element<S>>(),
                               op.get(), &c));
}

// Block k of recv = block r of send of rank k. Sizes: send == recv, a multiple of n.
template <class S, class R, class = detail::if_buffers<S, R>>
void all_to_all(S &&send, R &&recv, const options &o = options()) {
    const detail::view<S> from(send);
    const detail::view<R> to(recv);
    const std::size_t n = detail::ranks_of(o), count = from.size() / n;

    detail::check_buffers<S, R>("all_to_all", o);
    detail::check_size("all_to_all", "send", from.size(), count * n,
                       "a multiple of the number of ranks");
    detail::check_size("all_to_all", "recv", to.size(), from.size(), "as many as send");
    const idist_opts c = o.get();
    check(idist_all_to_all(from.data(), to.data(), count, dtype_of<detail::element<S>>(), &c));
}

template <class B, class = detail::if_buffer<B>>
void all_to_all(B &&inout, const options &o = options()) {
    const detail::view<B> both(inout);

    detail::check_receives<B>();
    all_to_all(both, both, o);
}

// recv[i] = op over the ranks 0 .. r of send[i]. Sizes: send == recv.
template <class S, class R, class = detail::if_buffers<S, R>>
void scan(S &&send, R &&recv, reduction<detail::element<S>> op, const options &o = options()) {
    const detail::view<S> from(send);
    const detail::view<R> to(recv);

    detail::check_buffers<S, R>("scan", o);
    detail::check_size("scan", "recv", to.size(), from.size(), "as many as send");
    const idist_opts c = o.get();
    check(idist_scan(from.data(), to.data(), from.size(), dtype_of<detail::element<S>>(), op.get(),
                     &c));
}

template <class T, class = detail::if_value<T>>
IDIST_NODISCARD T scan(T value, detail::reduction_of<T> op, const options &o = options()) {
    const span<T> both(&value, 1);

    detail::check_blocks("scan", o);
    scan(both, both, op, o);
    return value;
}

// recv[i] = op over the ranks 0 .. r-1 of send[i]; on rank 0, recv is unchanged. Sizes: send ==
// recv.
template <class S, class R, class = detail::if_buffers<S, R>>
void exscan(S &&send, R &&recv, reduction<detail::element<S>> op, const options &o = options()) {
    const detail::view<S> from(send);
    const detail::view<R> to(recv);

    detail::check_buffers<S, R>("exscan", o);
    detail::check_size("exscan", "recv", to.size(), from.size(), "as many as send");
    const idist_opts c = o.get();
    check(idist_exscan(from.data(), to.data(), from.size(), dtype_of<detail::element<S>>(),
                       op.get(), &c));
}

// Returns op over the values of the ranks 0 .. r-1, or `first` on rank 0.
template <class T, class = detail::if_value<T>>
IDIST_NODISCARD T exscan(T value, detail::reduction_of<T> op, detail::identity<T> first,
                         const options &o = options()) {
    detail::check_blocks("exscan", o);
    exscan(span<const T>(&value, 1), span<T>(&first, 1), op, o);
    return first;
}

// The v-forms send counts[k] elements to rank k, or receive them from rank k. These elements begin
// at element displs[k] of the larger buffer. Without displs, the blocks follow each other without
// gaps. The larger buffer must extend to the end of its last block. With a request, the arrays must
// outlive the request, like the buffers.

// recv[displs[k] + i] = send[i] of rank k. Sizes: send == counts[r].
template <class S, class R, class = detail::if_buffers<S, R>>
void all_gatherv(S &&send, R &&recv, span<const std::size_t> counts, span<const std::size_t> displs,
                 const options &o = options()) {
    const detail::view<S> from(send);
    const detail::view<R> to(recv);

    detail::check_buffers<S, R>("all_gatherv", o);
    detail::check_v("all_gatherv", to.size(), counts, displs, o);
    const idist_opts c = o.get();
    check(idist_all_gatherv(from.data(), from.size(), to.data(), counts.data(), displs.data(),
                            dtype_of<detail::element<S>>(), &c));
}

template <class S, class R, class = detail::if_buffers<S, R>>
void all_gatherv(S &&send, R &&recv, span<const std::size_t> counts, const options &o = options()) {
    all_gatherv(std::forward<S>(send), std::forward<R>(recv), counts, span<const std::size_t>(), o);
}

// recv[displs[k] + i] = send[i] of rank k, on root only. On other ranks recv, counts and displs are
// ignored. Sizes: send == counts[r] of root.
template <class S, class R, class = detail::if_buffers<S, R>>
void gatherv(S &&send, R &&recv, span<const std::size_t> counts, span<const std::size_t> displs,
             int root, const options &o = options()) {
    const detail::view<S> from(send);
    const detail::view<R> to(recv);

    detail::check_buffers<S, R>("gatherv", o);
    if (detail::is_root(root, o)) detail::check_v("gatherv", to.size(), counts, displs, o);
    const idist_opts c = o.get();
    check(idist_gatherv(from.data(), from.size(), to.data(), counts.data(), displs.data(),
                        dtype_of<detail::element<S>>(), root, &c));
}

template <class S, class R, class = detail::if_buffers<S, R>>
void gatherv(S &&send, R &&recv, span<const std::size_t> counts, int root,
             const options &o = options()) {
    gatherv(std::forward<S>(send), std::forward<R>(recv), counts, span<const std::size_t>(), root,
            o);
}

// recv[i] = send[displs[r] + i] of root. On other ranks send, counts and displs are ignored. Sizes:
// recv == counts[r] of root.
template <class S, class R, class = detail::if_buffers<S, R>>
void scatterv(S &&send, span<const std::size_t> counts, span<const std::size_t> displs, R &&recv,
              int root, const options &o = options()) {
    const detail::view<S> from(send);
    const detail::view<R> to(recv);

    detail::check_buffers<S, R>("scatterv", o);
    if (detail::is_root(root, o)) detail::check_v("scatterv", from.size(), counts, displs, o);
    const idist_opts c = o.get();
    check(idist_scatterv(from.data(), counts.data(), displs.data(), to.data(), to.size(),
                         dtype_of<detail::element<S>>(), root, &c));
}

template <class S, class R, class = detail::if_buffers<S, R>>
void scatterv(S &&send, span<const std::size_t> counts, R &&recv, int root,
              const options &o = options()) {
    scatterv(std::forward<S>(send), counts, span<const std::size_t>(), std::forward<R>(recv), root,
             o);
}

// recv[i] = op over all ranks of send[d + i], where d is the sum of the counts before counts[r].
// Sizes: send == the sum of counts, recv == counts[r].
template <class S, class R, class = detail::if_buffers<S, R>>
void reduce_scatterv(S &&send, R &&recv, span<const std::size_t> counts,
                     reduction<detail::element<S>> op, const options &o = options()) {
    const detail::view<S> from(send);
    const detail::view<R> to(recv);
    const int r = idist_group_rank(o.group());

    detail::check_buffers<S, R>("reduce_scatterv", o);
    detail::check_v("reduce_scatterv", from.size(), counts, span<const std::size_t>(), o);
    if (r >= 0)
        detail::check_size("reduce_scatterv", "recv", to.size(),
                           counts[static_cast<std::size_t>(r)], "counts[rank]");
    const idist_opts c = o.get();
    check(idist_reduce_scatterv(from.data(), to.data(), counts.data(),
                                dtype_of<detail::element<S>>(), op.get(), &c));
}

// Sends sendcounts[k] elements at senddispls[k] to rank k, and receives recvcounts[k] elements at
// recvdispls[k] from rank k.
template <class S, class R, class = detail::if_buffers<S, R>>
void all_to_allv(S &&send, span<const std::size_t> sendcounts, span<const std::size_t> senddispls,
                 R &&recv, span<const std::size_t> recvcounts, span<const std::size_t> recvdispls,
                 const options &o = options()) {
    const detail::view<S> from(send);
    const detail::view<R> to(recv);

    detail::check_buffers<S, R>("all_to_allv", o);
    detail::check_v("all_to_allv", from.size(), sendcounts, senddispls, o);
    detail::check_v("all_to_allv", to.size(), recvcounts, recvdispls, o);
    const idist_opts c = o.get();
    check(idist_all_to_allv(from.data(), sendcounts.data(), senddispls.data(), to.data(),
                            recvcounts.data(), recvdispls.data(), dtype_of<detail::element<S>>(),
                            &c));
}

template <class S, class R, class = detail::if_buffers<S, R>>
void all_to_allv(S &&send, span<const std::size_t> sendcounts, R &&recv,
                 span<const std::size_t> recvcounts, const options &o = options()) {
    const span<const std::size_t> none;

    all_to_allv(std::forward<S>(send), sendcounts, none, std::forward<R>(recv), recvcounts, none,
                o);
}

//------------------------------------------------------------------------------
// [hpp:text]  strings and vectors whose sizes the receivers do not know
//
// These functions always block and allocate memory.
//------------------------------------------------------------------------------

namespace detail {

struct idist_freed {
    void operator()(void *ptr) const noexcept { idist_free(ptr); }
};

template <class T> struct received {
    std::unique_ptr<void, idist_freed> memory;
    std::size_t count;

    const T *begin() const noexcept { return static_cast<const T *>(memory.get()); }
};

template <class T>
received<T> broadcast_alloc(const char *call, const T *send, std::size_t size, int root,
                            const options &o) {
    const idist_dtype dtype = dtype_of<T>();
    idist_dtype got = dtype;
    void *memory = nullptr;
    received<T> result{nullptr, 0};

    check_blocks(call, o);
    const idist_opts c = o.get();
    check(idist_broadcast_alloc(send, size, dtype, root, &memory, &result.count, &got, &c));
    result.memory.reset(memory);
    if (got != dtype)
        throw error(IDIST_ERR_MISMATCH, std::string(call) + ": root sends " +
                                            idist_dtype_name(got) + ", this rank expects " +
                                            idist_dtype_name(dtype));
    return result;
}

template <class T>
received<T> all_gather_alloc(const char *call, const T *send, std::size_t size,
                             std::vector<std::size_t> &counts, const options &o) {
    void *memory = nullptr;
    received<T> result{nullptr, 0};

    check_blocks(call, o);
    counts.resize(ranks_of(o));
    const idist_opts c = o.get();
    check(idist_all_gather_alloc(send, size, dtype_of<T>(), &memory, counts.data(), &c));
    result.memory.reset(memory);
    for (std::size_t count : counts) result.count += count;
    return result;
}

} // namespace detail

// Copies root's text to all ranks.
inline void broadcast(std::string &text, int root, const options &o = options()) {
    const detail::received<char> got =
        detail::broadcast_alloc("broadcast", text.data(), text.size(), root, o);

    text.assign(got.begin(), got.count);
}

// Copies root's elements to all ranks, and gives each vector the size of root's vector.
template <class T>
void broadcast_resize(std::vector<T> &values, int root, const options &o = options()) {
    const detail::received<T> got =
        detail::broadcast_alloc("broadcast_resize", values.data(), values.size(), root, o);

    values.assign(got.begin(), got.begin() + got.count);
}

// Returns the texts of all ranks, in rank order.
IDIST_NODISCARD inline std::vector<std::string> all_gather(const std::string &text,
                                                           const options &o = options()) {
    std::vector<std::size_t> counts;
    const detail::received<char> got =
        detail::all_gather_alloc("all_gather", text.data(), text.size(), counts, o);
    std::vector<std::string> texts;
    const char *at = got.begin();

    texts.reserve(counts.size());
    for (std::size_t count : counts) {
        texts.emplace_back(at, count);
        at += count;
    }
    return texts;
}

// Returns the elements of all ranks, in rank order. The number of elements may differ between
// ranks. If counts is not nullptr, *counts receives the number of each rank.
template <class S, class = detail::if_buffer<S>>
IDIST_NODISCARD std::vector<detail::element<S>>
all_gather_concat(S &&send, const options &o = options(),
                  std::vector<std::size_t> *counts = nullptr) {
    typedef detail::element<S> element;
    const span<const element> from(send);
    std::vector<std::size_t> own;
    const detail::received<element> got =
        detail::all_gather_alloc("all_gather_concat", from.data(), from.size(),
                                 counts ? *counts : own, o);

    return std::vector<element>(got.begin(), got.begin() + got.count);
}

//------------------------------------------------------------------------------
// [hpp:p2p]  send and receive
//------------------------------------------------------------------------------

constexpr int any_source = IDIST_ANY_SOURCE;
constexpr int any_tag = IDIST_ANY_TAG;

// Sends a buffer, or a value, to rank dst.
template <class S, class = detail::if_buffer<S>>
void send(S &&buf, int dst, int tag, const options &o = options()) {
    const detail::view<S> from(buf);

    detail::check_outlives<S>("send", o);
    const idist_opts c = o.get();
    check(idist_send(from.data(), from.size(), dtype_of<detail::element<S>>(), dst, tag, &c));
}

template <class T, class = detail::if_value<T>>
void send(const T &value, int dst, int tag, const options &o = options()) {
    // Inside together(), the value must outlive the call of together(), like any buffer.
    if (o.is_deferred()) detail::check_blocks("send", o);
    if (detail::together_depth()) {
        const idist_opts c = o.get();
        return check(idist_send(&value, 1, dtype_of<T>(), dst, tag, &c));
    }
    send(span<const T>(&value, 1), dst, tag, o);
}

// Receives a message of at most as many elements as buf has, and describes it in info. With a
// request, info must outlive the request.
template <class R, class = detail::if_buffer<R>>
void recv(R &&buf, int src, int tag, idist_recv_info &info, const options &o = options()) {
    const detail::view<R> to(buf);

    detail::check_receives<R>();
    const idist_opts c = o.get();
    check(idist_recv(to.data(), to.size(), dtype_of<detail::element<R>>(), src, tag, &info, &c));
}

// Receives a message of at most as many elements as buf has, and returns its source, tag and count.
// With a request, and inside together(), these are not known yet.
template <class R, class = detail::if_buffer<R>>
idist_recv_info recv(R &&buf, int src, int tag, const options &o = options()) {
    const detail::view<R> to(buf);
    idist_recv_info info = idist_recv_info();

    detail::check_receives<R>();
    const idist_opts c = o.get();
    check(idist_recv(to.data(), to.size(), dtype_of<detail::element<R>>(), src, tag,
                     o.is_deferred() || detail::together_depth() ? nullptr : &info, &c));
    return info;
}

// Receives one element: recv_value<double>(src, tag).
template <class T> IDIST_NODISCARD T recv_value(int src, int tag, const options &o = options()) {
    T value = T();

    detail::check_blocks("recv_value", o);
    recv(span<T>(&value, 1), src, tag, o);
    return value;
}

// Receives a message of any size. If several threads receive with any_source, each gets one
// message. The message is lost if memory for it cannot be allocated, or if its elements are of
// another type.
template <class T>
IDIST_NODISCARD std::vector<T> recv_vector(int src, int tag, const options &o = options(),
                                           idist_recv_info *info = nullptr) {
    idist_message message = idist_message();
    std::vector<T> values;

    detail::check_blocks("recv_vector", o);
    const idist_opts c = o.get();
    check(idist_mprobe(src, tag, &message, &c));
    values.resize(message.info.count);
    check(idist_mrecv(values.data(), values.size(), dtype_of<T>(), &message, &c));
    if (info) *info = message.info;
    return values;
}

// Sends and receives at the same time, so that neighbors can exchange data without deadlock.
// Returns a description of the received message.
template <class S, class R, class = detail::if_buffers<S, R>>
idist_recv_info sendrecv(S &&sendbuf, int dst, int sendtag, R &&recvbuf, int src, int recvtag,
                         const options &o = options()) {
    const detail::view<S> from(sendbuf);
    const detail::view<R> to(recvbuf);
    idist_recv_info info = idist_recv_info();

    detail::check_receives<R>();
    detail::check_same<S, R>();
    const idist_opts c = o.get();
    check(idist_sendrecv(from.data(), from.size(), dst, sendtag, to.data(), to.size(), src, recvtag,
                         dtype_of<detail::element<S>>(),
                         o.is_deferred() || detail::together_depth() ? nullptr : &info, &c));
    return info;
}

// Waits for a message and returns its description. The message can still be received.
inline idist_recv_info probe(int src, int tag, const options &o = options()) {
    idist_recv_info info = idist_recv_info();

    detail::check_blocks("probe", o);
    const idist_opts c = o.get();
    check(idist_probe(src, tag, &info, &c));
    return info;
}

// Returns true if there is a message, and describes it in *info. Does not wait.
inline bool iprobe(int src, int tag, idist_recv_info *info = nullptr,
                   const options &o = options()) {
    const idist_opts c = o.get();
    bool found = false;

    check(idist_iprobe(src, tag, &found, info, &c));
    return found;
}

//------------------------------------------------------------------------------
// [hpp:spawn]  worker processes, and functions that some ranks run first
//
// A callable f, such as a lambda with captures, is called as f(local_rank) or f(). It returns an
// int, 0 for success, or nothing. If it throws, the worker fails, and the caller of spawn gets an
// error with the exception's text.
//------------------------------------------------------------------------------

namespace detail {

template <class F> auto call(F &f, int local_rank, int) -> decltype(f(local_rank)) {
    return f(local_rank);
}
template <class F> auto call(F &f, int, long) -> decltype(f()) { return f(); }

template <class F> int call_for_code(F &f, int local_rank, std::true_type) {
    call(f, local_rank, 0);
    return 0;
}
template <class F> int call_for_code(F &f, int local_rank, std::false_type) {
    return static_cast<int>(call(f, local_rank, 0));
}

// Adapts the caller's callable to the functions of idist.h, through which no exception may pass.
// The exception is stored in `thrown`.
template <class F> struct callable {
    F &f;
    std::exception_ptr thrown;

    int run(int local_rank) noexcept {
        typedef decltype(call(f, 0, 0)) result;

        try {
            return call_for_code(f, local_rank, std::is_void<result>());
        } catch (const std::exception &e) {
            thrown = std::current_exception();
            idist_set_last_error(e.what());
        } catch (...) {
            thrown = std::current_exception();
            idist_set_last_error("an exception not derived from std::exception");
        }
        return 1;
    }

    static int worker(int local_rank, void *arg) noexcept {
        return static_cast<callable *>(arg)->run(local_rank);
    }
    static int task(void *arg) noexcept { return static_cast<callable *>(arg)->run(0); }

    // Rethrows the exception that f threw in this process. Otherwise throws the call's error, if
    // any.
    void finish(idist_status status) const {
        if (thrown) std::rethrow_exception(thrown);
        check(status);
    }
};

inline void check_workers(idist_status status, const idist_report &report) {
    if (status != IDIST_OK && report.rank >= 0)
        throw worker_error(status, idist_last_error(), report);
    check(status);
}

inline idist_report no_report() noexcept {
    idist_report report = idist_report();

    report.rank = -1;
    return report;
}

} // namespace detail

// Forks nproc_per_node processes, or one per core if nproc_per_node is 0. Each process runs f in a
// new world. Waits until all processes have ended, and throws worker_error if one failed. In a
// worker, spawn does not return.
template <class F>
void spawn(F &&f, int nproc_per_node = 0, const idist_desc &desc = idist_desc()) {
    typedef detail::callable<typename std::remove_reference<F>::type> callable;
    callable work = {f, nullptr};
    idist_report report;
    idist_desc d = desc;

    if (!d.report) d.report = &report;
    *d.report = detail::no_report();
    const idist_status status = idist_spawn(&callable::worker, &work, nproc_per_node, &d);
    detail::check_workers(status, *d.report);
}

// Calls spawn if desc.nproc_per_node is set. Otherwise joins the launcher's world, runs f in this
// process and leaves the world. If f throws in this process, the exception is rethrown after the
// world has ended.
template <class F> void parallel_run(const idist_desc &desc, F &&f, const char *name = "callable") {
    typedef detail::callable<typename std::remove_reference<F>::type> callable;
    callable work = {f, nullptr};
    idist_report report;
    idist_desc d = desc;

    if (!d.report) d.report = &report;
    *d.report = detail::no_report();
    const idist_status status = idist_parallel_run_named(&d, &callable::worker, &work, name);
    if (work.thrown) std::rethrow_exception(work.thrown);
    detail::check_workers(status, *d.report);
}

// Workers that run beside the caller. The destructor waits for them, without a limit. If an
// exception destroys the object, the destructor kills them first. One thread must construct, poll
// and destroy the object.
class workers {
  public:
    template <class F>
    explicit workers(F &&f, int nproc_per_node = 0, const idist_desc &desc = idist_desc())
        : workers_(nullptr), report_(new idist_report(detail::no_report())) {
        typedef detail::callable<typename std::remove_reference<F>::type> callable;
        callable work = {f, nullptr};
        idist_desc d = desc;

        d.report = report_.get();
        check(idist_spawn_start(&callable::worker, &work, nproc_per_node, &d, &workers_));
    }
    workers(workers &&other) noexcept
        : workers_(other.workers_), report_(std::move(other.report_)) {
        other.workers_ = nullptr;
    }
    workers &operator=(workers &&) = delete;
    ~workers() {
        if (workers_ && unwinding_) idist_spawn_kill(workers_, 9);
        if (workers_) idist_spawn_wait(workers_, -1);
    }

    // Waits until all workers have ended. Throws worker_error if one failed.
    void wait() {
        idist_workers *ended = workers_;

        workers_ = nullptr;
        detail::check_workers(idist_spawn_wait(ended, -1), *report_);
    }

    // Returns true if all workers have ended. Does not block.
    bool poll() {
        bool done = true;

        check(idist_spawn_poll(workers_, &done));
        return done;
    }

    void kill(int signal_number) { check(idist_spawn_kill(workers_, signal_number)); }

  private:
    idist_workers *workers_;
    std::unique_ptr<idist_report> report_; // keeps its address if *this moves
    detail::unwinding unwinding_;
};

// Runs f on the given rank first, and then on the other ranks. If f throws on the given rank, the
// exception is rethrown there, and the other ranks get IDIST_ERR_CALLBACK.
template <class F> void one_rank_first(F &&f, int rank = 0, const options &o = options()) {
    typedef detail::callable<typename std::remove_reference<F>::type> callable;
    callable task = {f, nullptr};
    const idist_opts c = o.get();

    task.finish(idist_one_rank_first(&callable::task, &task, rank, false, &c));
}

// On each host, runs f first on the rank with the given local rank, and then on the host's other
// ranks.
template <class F> void local_rank_first(F &&f, int rank = 0, const options &o = options()) {
    typedef detail::callable<typename std::remove_reference<F>::type> callable;
    callable task = {f, nullptr};
    const idist_opts c = o.get();

    task.finish(idist_one_rank_first(&callable::task, &task, rank, true, &c));
}

// Runs f on the given rank only; the other ranks wait until f returns.
template <class F> void one_rank_only(F &&f, int rank = 0, const options &o = options()) {
    typedef detail::callable<typename std::remove_reference<F>::type> callable;
    callable task = {f, nullptr};
    const idist_opts c = o.get();

    task.finish(idist_one_rank_only(&callable::task, &task, rank, true, &c));
}

//------------------------------------------------------------------------------
// [hpp:memory]  buffers from idist_alloc, handles of other headers
//------------------------------------------------------------------------------

// Zeroed elements in memory that all ranks of the host map, so that large collectives move the data
// directly. The memory may be destroyed before or after the end of the world.
template <class T> class memory {
    static_assert(std::is_trivially_copyable<T>::value && std::is_trivially_destructible<T>::value,
                  "idist: elements in shared memory are plain data");

  public:
    typedef T value_type;

    memory() noexcept : data_(nullptr), size_(0) {}
    explicit memory(std::size_t size, const options &o = options()) : data_(nullptr), size_(size) {
        const idist_opts c = o.get();

        if (size > std::numeric_limits<std::size_t>::max() / sizeof(T))
            throw error(IDIST_ERR_NO_MEMORY, "idist::memory: the size overflows");
        data_ = static_cast<T *>(idist_alloc(size * sizeof(T), &c));
        if (!data_ && size) throw error(IDIST_ERR_NO_MEMORY, idist_last_error());
    }
    memory(memory &&other) noexcept : data_(other.data_), size_(other.size_) {
        other.data_ = nullptr;
        other.size_ = 0;
    }
    memory &operator=(memory &&other) noexcept {
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
        return *this;
    }
    ~memory() { idist_free(data_); }

    T *data() noexcept { return data_; }
    const T *data() const noexcept { return data_; }
    std::size_t size() const noexcept { return size_; }
    T *begin() noexcept { return data_; }
    T *end() noexcept { return data_ + size_; }
    const T *begin() const noexcept { return data_; }
    const T *end() const noexcept { return data_ + size_; }
    T &operator[](std::size_t i) { return data_[i]; }
    const T &operator[](std::size_t i) const { return data_[i]; }

  private:
    T *data_;
    std::size_t size_;
};

namespace detail {

template <class T, void (*Free)(T **)> struct freed_by {
    void operator()(T *p) const { Free(&p); }
};

} // namespace detail

// Owns and frees an object that a function of another header, such as idist_train.h, has created:
//
//     idist::handle<idist_ddp, idist_ddp_free> ddp;
//     ddp = idist::create<idist_ddp, idist_ddp_free>(idist_ddp_create, ddp_desc);
template <class T, void (*Free)(T **)> using handle = std::unique_ptr<T, detail::freed_by<T, Free>>;

template <class T, void (*Free)(T **), class Desc>
handle<T, Free> create(idist_status (*make)(const Desc *, T **), const Desc &desc) {
    T *p = nullptr;

    check(make(&desc, &p));
    return handle<T, Free>(p);
}

} // namespace idist

#undef IDIST_NODISCARD

#endif // IDIST_HPP

/*
MIT License

Copyright (c) 2026 idist contributors

Permission is hereby granted, free of charge, to any person obtaining a copy
of this software and associated documentation files (the "Software"), to deal
in the Software without restriction, including without limitation the rights
to use, copy, modify, merge, publish, distribute, sublicense, and/or sell
copies of the Software, and to permit persons to whom the Software is
furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all
copies or substantial portions of the Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR
IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY,
FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE
AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER
LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE
SOFTWARE.
*/
