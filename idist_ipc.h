/* idist_ipc.h - v0.2.0 - ranks that share a GPU read each other's memory (CUDA IPC) - MIT licence

    idist_nccl.h includes this file; there is nothing in it to call. idist uses CUDA IPC by itself
    where NCCL does not go: for ranks of one host that share a GPU. It takes CUDA 12.8 or later;
    with an older one, and wherever IPC does not work, the group is staged through host memory.

    The device backend "ipc" supports all collectives except barriers, prefix sums and v-forms; of
    reductions, SUM, PROD, MIN, MAX and AVG of F16, BF16, F32 and F64, and premultiplied sums of F32
    and F64. The rest is staged. The operands are combined in the order of the ranks, so the results
    have the same bits as those of host memory that the ranks share.

WHAT IT COSTS

    64 MiB of device memory for each rank of each group that makes such calls, kept for the next
    group. Each call first copies its data into that memory.

    The kernels are compiled once per world, in its first such call. The first call of each group
    also reads the memory of every rank once. If the driver is too old for them, or the machine
    corrupts what one GPU reads from another (an IOMMU, or PCIe ACS; boot with iommu=pt, or disable
    ACS), the group is staged, with a warning.

CONTENTS

      [ipc:ptx]     kernels that reduce and pack what one GPU can read
      [ipc:kernel]  loading the kernels, and launching them
      [ipc:arena]   device memory that other ranks map
      [ipc:leave]   the end of a world: giving the memory back
      [ipc:probe]   does this rank read what the others have written?
      [ipc:setup]   what the members of a group set up in its first call
      [ipc:call]    calls of ranks that read each other's device memory
      [ipc:own]     device memory of this rank alone, for idist_train.h
*/
#ifndef IDIST_NCCL_H
#include "idist_nccl.h" // which includes this file where it belongs
#endif

#if defined(IDIST__INSIDE_NCCL_H) && !defined(IDIST_IPC_IMPLEMENTATION_DONE)
#define IDIST_IPC_IMPLEMENTATION_DONE

//------------------------------------------------------------------------------
// [ipc:ptx]  kernels that reduce and pack what one GPU can read
// uses -
//
// idist_reduce_f32, _f64, _f16 and _bf16 compute out[i] = in[0][i] (op) ... (op) in[n - 1][i], with
// the same bits as idist__reduce_many. idist_pack_halves, _pack_bytes and idist_unpack_bytes do
// what [train:compress] does, with the same bits. No kernel waits for anything.
//
// The strings below, joined, are the PTX that the driver compiles for its GPU. Their source is
// tests/gpu/reduce.cu and tests/gpu/pack.cu.
//------------------------------------------------------------------------------

#define IDIST__PTX_OPERANDS 16
#define IDIST__PTX_SCALED 16   // an op: SUM of each operand times factor
#define IDIST__PTX_THREADS 512 // per block, at most
#define IDIST__PTX_NBYTES 16   // of each operand, per thread and turn

// The only parameter of a kernel that reduces. All pointers are aligned to an element; the kernel
// is faster if all are aligned to 16 bytes. `out` and `also` may equal any of in[]; otherwise they
// do not overlap.
typedef struct idist__ptx_args {
    const void *in[IDIST__PTX_OPERANDS];
    void *out;
    void *also; // gets the same as out; NULL: nothing
    unsigned long long count;
    double factor;
    int n;  // of in[], 1 or more
    int op; // of idist_op
} idist__ptx_args;

// Indices of idist__gpu.kernels: 0 to 3 reduce F16, BF16, F32 and F64 (dtype - IDIST_F16). Then the
// ops of PACK_HALVES, and those of PACK_BYTES.
enum { IDIST__PACK_HALVES = 4, IDIST__PACK_BYTES, IDIST__UNPACK_BYTES };
enum { IDIST__PACK_F16, IDIST__PACK_BF16, IDIST__UNPACK_F16, IDIST__UNPACK_BF16 };
enum { IDIST__PACK_GIVE, IDIST__PACK_ADD };

typedef struct idist__pack_args {
    const void *in;
    float *residual; // PACK_BYTES: rounding errors carried over, padded_count floats
    void *out;
    unsigned long long count;        // floats
    unsigned long long padded_count; // PACK_BYTES: count, rounded up to a multiple of 1,024
    float factor;                    // ADD: the sum is multiplied by it
    int n;                           // ADD: contributions, one after another in `in`
    int op;
} idist__pack_args;

// Made by tests/gpu/make_ptx.sh with nvcc 13.0.88.
// clang-format off
static const char *const idist__ptx[] IDIST__UNUSED = {
    ".version 6.4\n.target sm_60\n.address_size 64\n.visible .entry idist_reduce_f32(.param ",
    ".align 8 .b8 a[168]).maxntid 512,1,1{.reg .pred p<45>;.reg .f32 f<60>;.reg .b32 r<105>;",
    ".reg .f64 g<10>;.reg .b64 d<47>;mov.b64 d25,a;mov.u32 r46,%ctaid.x;mov.u32 r47,%ntid.x;",
    "mul.wide.u32 d26,r46,r47;mov.u32 r48,%tid.x;cvt.u64.u32 d27,r48;add.s64 d45,d26,d27;",
    "add.s64 d3,d25,128;ld.param.u64 d28,[a+136];ld.param.u64 d29,[a+128];or.b64 d43,d28,d29;",
    "mov.u32 r86,0;ld.param.u32 r1,[a+160];L1:.pragma \"nounroll\";mul.wide.s32 d30,r86,8;",
    "add.s64 d31,d25,d30;ld.param.u64 d32,[d31];or.b64 d43,d32,d43;add.s32 r86,r86,1;",
    "setp.lt.s32 p2,r86,r1;@p2 bra L1;and.b64 d7,d43,15;ld.param.u32 r4,[d3+36];ld.param.u64 d8,",
    "[d3+16];shl.b64 d44,d45,2;setp.ge.u64 p3,d44,d8;@p3 bra L50;ld.param.f64 g1,[d3+24];",
    "ld.param.u64 d10,[d3];ld.param.u64 d11,[d3+8];ld.param.u32 r5,[d3+32];cvt.rn.f32.s32 f1,r5;",
    "or.b32 r55,r4,1;cvta.to.global.u64 d40,d10;L4:.pragma \"nounroll\";sub.s64 d14,d8,d44;",
    "setp.gt.u64 p4,d14,3;setp.eq.s64 p5,d7,0;and.pred p1,p5,p4;mov.u32 r87,1;setp.eq.s32 p6,",
    "r55,3;selp.f32 f43,0f7F800000,0f80000000,p6;setp.eq.s32 p7,r4,1;selp.f32 f52,0f3F800000,",
    "f43,p7;mov.u32 r100,0;mov.u64 d46,d25;mov.f32 f53,f52;mov.f32 f54,f52;mov.f32 f55,f52;",
    "mov.u32 r101,r100;mov.u32 r102,r100;mov.u32 r103,r100;mov.u32 r104,r100;L5:.pragma ",
    "\"nounroll\";mov.u32 r6,r87;setp.eq.s32 p8,r104,0;@!p8 bra L6;ld.param.u64 d33,[d46];",
    "cvta.to.global.u64 d34,d33;shl.b64 d35,d45,4;add.s64 d18,d34,d35;@!p1 bra L8;",
    "ld.global.v4.u32{r99,r98,r97,r96},[d18];mov.u32 r104,0;setp.ge.s32 p13,r6,r5;@p13 bra L18;",
    "ld.param.u64 d36,[d46+8];cvta.to.global.u64 d37,d36;add.s64 d39,d37,d35;ld.global.v4.u32{",
    "r100,r101,r102,r103},[d39];mov.u32 r104,1;bra L18;L6:mov.u32 r104,0;mov.u32 r96,r103;",
    "mov.u32 r97,r102;mov.u32 r98,r101;mov.u32 r99,r100;bra L18;L8:setp.eq.s64 p9,d14,0;mov.u32 ",
    "r98,0;mov.u32 r99,r98;@!p9 ld.global.u32 r99,[d18];setp.lt.u64 p10,d14,2;@!p10 ",
    "ld.global.u32 r98,[d18+4];setp.lt.u64 p11,d14,3;mov.u32 r104,0;mov.u32 r97,r104;@!p11 ",
    "ld.global.u32 r97,[d18+8];setp.lt.u64 p12,d14,4;mov.u32 r96,r104;@!p12 ld.global.u32 r96,",
    "[d18+12];L18:setp.eq.s32 p14,r4,3;selp.b32 r73,-2147483648,0,p14;xor.b32 r74,r99,r73;",
    "xor.b32 r75,r98,r73;xor.b32 r76,r97,r73;xor.b32 r77,r96,r73;mov.b32 f18,r74;mov.b32 f17,",
    "r75;mov.b32 f16,r76;mov.b32 f15,r77;setp.ne.s32 p15,r4,16;@p15 bra L20;cvt.f64.f32 g2,f18;",
    "mul.rn.f64 g3,g2,g1;cvt.rn.f32.f64 f18,g3;cvt.f64.f32 g4,f17;mul.rn.f64 g5,g4,g1;",
    "cvt.rn.f32.f64 f17,g5;cvt.f64.f32 g6,f16;mul.rn.f64 g7,g6,g1;cvt.rn.f32.f64 f16,g7;",
    "cvt.f64.f32 g8,f15;mul.rn.f64 g9,g8,g1;cvt.rn.f32.f64 f15,g9;L20:@!p7 bra L21;mul.rn.f32 ",
    "f55,f55,f18;mul.rn.f32 f54,f54,f17;mul.rn.f32 f53,f53,f16;mul.rn.f32 f52,f52,f15;bra L25;",
    "L21:@!p6 bra L22;setp.gt.f32 p18,f18,f55;setp.nan.f32 p19,f55,f55;or.pred p20,p18,p19;",
    "selp.f32 f55,f55,f18,p20;setp.nan.f32 p21,f54,f54;setp.lt.f32 p22,f54,f17;or.pred p23,p22,",
    "p21;selp.f32 f54,f54,f17,p23;setp.nan.f32 p24,f53,f53;setp.lt.f32 p25,f53,f16;or.pred p26,",
    "p25,p24;selp.f32 f53,f53,f16,p26;setp.nan.f32 p27,f52,f52;setp.lt.f32 p28,f52,f15;or.pred ",
    "p29,p28,p27;selp.f32 f52,f52,f15,p29;bra L25;L22:add.rn.f32 f55,f55,f18;add.rn.f32 f54,f54,",
    "f17;add.rn.f32 f53,f53,f16;add.rn.f32 f52,f52,f15;L25:add.s32 r87,r6,1;add.s64 d46,d46,8;",
    "shl.b64 d20,d45,4;setp.lt.s32 p30,r6,r5;@p30 bra L5;setp.ne.s32 p31,r4,4;@p31 bra L28;",
    "div.rn.f32 f55,f55,f1;div.rn.f32 f54,f54,f1;div.rn.f32 f53,f53,f1;div.rn.f32 f52,f52,f1;",
    "L28:mov.b32 r80,f55;xor.b32 r41,r73,r80;mov.b32 r81,f54;xor.b32 r42,r73,r81;mov.b32 r82,",
    "f53;xor.b32 r43,r73,r82;mov.b32 r83,f52;xor.b32 r44,r73,r83;add.s64 d21,d40,d20;@!p1 bra ",
    "L29;st.global.v4.u32[d21],{r41,r42,r43,r44};bra L38;L29:setp.eq.s64 p33,d14,0;@!p33 ",
    "st.global.u32[d21],r41;setp.lt.u64 p34,d14,2;@!p34 st.global.u32[d21+4],r42;setp.lt.u64 ",
    "p35,d14,3;@!p35 st.global.u32[d21+8],r43;setp.lt.u64 p36,d14,4;@!p36 st.global.u32[d21+12],",
    "r44;L38:setp.ne.s64 p37,d11,0;and.pred p38,p1,p37;cvta.to.global.u64 d41,d11;add.s64 d22,",
    "d41,d20;@!p38 bra L39;st.global.v4.u32[d22],{r41,r42,r43,r44};bra L49;L39:setp.eq.s64 p39,",
    "d11,0;@p39 bra L49;setp.eq.s64 p40,d14,0;@!p40 st.global.u32[d22],r41;setp.lt.u64 p41,d14,",
    "2;@!p41 st.global.u32[d22+4],r42;setp.lt.u64 p42,d14,3;@!p42 st.global.u32[d22+8],r43;",
    "setp.lt.u64 p43,d14,4;@!p43 st.global.u32[d22+12],r44;L49:mov.u32 r84,%nctaid.x;",
    "mul.wide.u32 d42,r84,r47;add.s64 d45,d45,d42;shl.b64 d44,d45,2;setp.lt.u64 p44,d44,d8;@p44 ",
    "bra L4;L50:ret;}.visible .entry idist_reduce_f64(.param .align 8 .b8 a[168]).maxntid 512,1,",
    "1{.reg .pred p<37>;.reg .b32 r<106>;.reg .f64 g<33>;.reg .b64 d<65>;mov.b64 d26,a;mov.u32 ",
    "r51,%ctaid.x;mov.u32 r52,%ntid.x;mul.wide.u32 d27,r51,r52;mov.u32 r53,%tid.x;cvt.u64.u32 ",
    "d28,r53;add.s64 d63,d27,d28;add.s64 d3,d26,128;ld.param.u64 d29,[a+136];ld.param.u64 d30,",
    "[a+128];or.b64 d61,d29,d30;mov.u32 r86,0;ld.param.u32 r1,[a+160];L1:.pragma \"nounroll\";",
    "mul.wide.s32 d31,r86,8;add.s64 d32,d26,d31;ld.param.u64 d33,[d32];or.b64 d61,d33,d61;",
    "add.s32 r86,r86,1;setp.lt.s32 p2,r86,r1;@p2 bra L1;ld.param.u32 r4,[d3+36];ld.param.u64 d7,",
    "[d3+16];shl.b64 d62,d63,1;setp.ge.u64 p3,d62,d7;@p3 bra L47;ld.param.f64 g1,[d3+24];",
    "ld.param.u64 d9,[d3];ld.param.u64 d10,[d3+8];ld.param.u32 r5,[d3+32];cvt.rn.f64.s32 g2,r5;",
    "and.b64 d11,d61,15;or.b32 r60,r4,1;cvta.to.global.u64 d58,d9;L4:.pragma \"nounroll\";",
    "sub.s64 d34,d7,d62;shl.b64 d14,d34,1;mov.u32 r87,1;setp.gt.u64 p4,d14,3;setp.eq.s64 p5,d11,",
    "0;and.pred p1,p5,p4;setp.eq.s32 p6,r60,3;selp.f64 g24,0d7FF0000000000000,",
    "0d8000000000000000,p6;setp.eq.s32 p7,r4,1;selp.f64 g29,0d3FF0000000000000,g24,p7;mov.u32 ",
    "r101,0;mov.u64 d64,d26;mov.f64 g30,g29;mov.u32 r102,r101;mov.u32 r103,r101;mov.u32 r104,",
    "r101;mov.u32 r105,r101;L5:.pragma \"nounroll\";mov.u32 r6,r87;setp.eq.s32 p8,r105,0;@!p8 ",
    "bra L6;ld.param.u64 d18,[d64];@!p1 bra L8;cvta.to.global.u64 d47,d18;shl.b64 d48,d63,4;",
    "add.s64 d49,d47,d48;ld.global.v4.u32{r99,r100,r97,r98},[d49];setp.ge.s32 p13,r6,r5;mov.u32 ",
    "r105,0;@p13 bra L19;ld.param.u64 d50,[d64+8];cvta.to.global.u64 d51,d50;add.s64 d53,d51,",
    "d48;ld.global.v4.u32{r101,r102,r103,r104},[d53];mov.u32 r105,1;bra L19;L6:mov.u32 r105,0;",
    "mov.u32 r97,r103;mov.u32 r98,r104;mov.u32 r99,r101;mov.u32 r100,r102;bra L19;L8:",
    "setp.eq.s64 p9,d14,0;mov.u32 r100,0;mov.u32 r99,r100;@p9 bra L10;cvta.to.global.u64 d35,",
    "d18;shl.b64 d36,d63,4;add.s64 d37,d35,d36;ld.global.u32 r99,[d37];L10:@p9 bra L12;",
    "cvta.to.global.u64 d38,d18;shl.b64 d39,d63,4;add.s64 d40,d38,d39;ld.global.u32 r100,",
    "[d40+4];L12:setp.lt.u64 p11,d14,3;mov.u32 r98,0;mov.u32 r97,r98;@p11 bra L14;",
    "cvta.to.global.u64 d41,d18;shl.b64 d42,d63,4;add.s64 d43,d41,d42;ld.global.u32 r97,[d43+8];",
    "L14:setp.lt.u64 p12,d14,4;@p12 bra L16;cvta.to.global.u64 d44,d18;shl.b64 d45,d63,4;",
    "add.s64 d46,d44,d45;ld.global.u32 r98,[d46+12];L16:mov.u32 r105,0;L19:setp.eq.s32 p14,r4,3;",
    "selp.b32 r77,-2147483648,0,p14;xor.b32 r78,r100,r77;mov.b64 d54,{r99,r78};mov.b64 g11,d54;",
    "xor.b32 r79,r98,r77;mov.b64 d55,{r97,r79};mov.b64 g10,d55;setp.ne.s32 p15,r4,16;@p15 bra ",
    "L21;mul.rn.f64 g11,g11,g1;mul.rn.f64 g10,g10,g1;L21:@!p7 bra L22;mul.rn.f64 g30,g30,g11;",
    "mul.rn.f64 g29,g29,g10;bra L26;L22:@!p6 bra L23;setp.lt.f64 p18,g30,g11;setp.nan.f64 p19,",
    "g30,g30;or.pred p20,p18,p19;selp.f64 g30,g30,g11,p20;setp.nan.f64 p21,g29,g29;setp.lt.f64 ",
    "p22,g29,g10;or.pred p23,p22,p21;selp.f64 g29,g29,g10,p23;bra L26;L23:add.rn.f64 g30,g30,",
    "g11;add.rn.f64 g29,g29,g10;L26:add.s32 r87,r6,1;add.s64 d64,d64,8;shl.b64 d20,d63,4;",
    "setp.lt.s32 p24,r6,r5;@p24 bra L5;setp.ne.s32 p25,r4,4;@p25 bra L29;div.rn.f64 g30,g30,g2;",
    "div.rn.f64 g29,g29,g2;L29:mov.b64 d56,g30;mov.b64{r48,r82},d56;xor.b32 r46,r82,r77;mov.b64 ",
    "d57,g29;mov.b64{r49,r83},d57;xor.b32 r47,r83,r77;add.s64 d21,d58,d20;@!p1 bra L30;",
    "st.global.v4.u32[d21],{r48,r46,r49,r47};bra L37;L30:setp.eq.s64 p27,d14,0;@p27 bra L32;",
    "st.global.u32[d21],r48;st.global.u32[d21+4],r46;L32:setp.lt.u64 p28,d14,3;@!p28 ",
    "st.global.u32[d21+8],r49;setp.lt.u64 p29,d14,4;@!p29 st.global.u32[d21+12],r47;L37:",
    "setp.ne.s64 p30,d10,0;and.pred p31,p1,p30;cvta.to.global.u64 d59,d10;add.s64 d23,d59,d20;",
    "@!p31 bra L38;st.global.v4.u32[d23],{r48,r46,r49,r47};bra L46;L38:setp.eq.s64 p32,d10,0;",
    "@p32 bra L46;setp.eq.s64 p33,d14,0;@p33 bra L41;st.global.u32[d23],r48;",
    "st.global.u32[d23+4],r46;L41:setp.lt.u64 p34,d14,3;@!p34 st.global.u32[d23+8],r49;",
    "setp.lt.u64 p35,d14,4;@!p35 st.global.u32[d23+12],r47;L46:mov.u32 r84,%nctaid.x;",
    "mul.wide.u32 d60,r84,r52;add.s64 d63,d63,d60;shl.b64 d62,d63,1;setp.lt.u64 p36,d62,d7;@p36 ",
    "bra L4;L47:ret;}.visible .entry idist_reduce_f16(.param .align 8 .b8 a[168]).maxntid 512,1,",
    "1{.reg .pred p<69>;.reg .b16 h<17>;.reg .f32 f<132>;.reg .b32 r<137>;.reg .f64 g<18>;.reg ",
    ".b64 d<47>;mov.b64 d25,a;mov.u32 r54,%ctaid.x;mov.u32 r55,%ntid.x;mul.wide.u32 d26,r54,r55;",
    "mov.u32 r56,%tid.x;cvt.u64.u32 d27,r56;add.s64 d45,d26,d27;add.s64 d3,d25,128;ld.param.u64 ",
    "d28,[a+136];ld.param.u64 d29,[a+128];or.b64 d43,d28,d29;mov.u32 r114,0;ld.param.u32 r1,",
    "[a+160];L1:.pragma \"nounroll\";mul.wide.s32 d30,r114,8;add.s64 d31,d25,d30;ld.param.u64 ",
    "d32,[d31];or.b64 d43,d32,d43;add.s32 r114,r114,1;setp.lt.s32 p2,r114,r1;@p2 bra L1;and.b64 ",
    "d7,d43,15;ld.param.u32 r4,[d3+36];ld.param.u64 d8,[d3+16];shl.b64 d44,d45,3;setp.ge.u64 p3,",
    "d44,d8;@p3 bra L74;ld.param.f64 g1,[d3+24];ld.param.u64 d10,[d3];ld.param.u64 d11,[d3+8];",
    "ld.param.u32 r5,[d3+32];cvt.rn.f32.s32 f1,r5;or.b32 r63,r4,1;cvta.to.global.u64 d40,d10;L4:",
    ".pragma \"nounroll\";sub.s64 d14,d8,d44;setp.gt.u64 p4,d14,7;setp.eq.s64 p5,d7,0;and.pred ",
    "p1,p5,p4;mov.u32 r115,1;setp.eq.s32 p6,r63,3;selp.f32 f83,0f7F800000,0f80000000,p6;",
    "setp.eq.s32 p7,r4,1;selp.f32 f116,0f3F800000,f83,p7;mov.u32 r132,0;mov.u64 d46,d25;mov.f32 ",
    "f117,f116;mov.f32 f118,f116;mov.f32 f119,f116;mov.f32 f120,f116;mov.f32 f121,f116;mov.f32 ",
    "f122,f116;mov.f32 f123,f116;mov.u32 r133,r132;mov.u32 r134,r132;mov.u32 r135,r132;mov.u32 ",
    "r136,r132;L5:.pragma \"nounroll\";mov.u32 r6,r115;setp.eq.s32 p8,r136,0;@!p8 bra L6;",
    "ld.param.u64 d33,[d46];cvta.to.global.u64 d34,d33;shl.b64 d35,d45,4;add.s64 d18,d34,d35;",
    "@!p1 bra L8;ld.global.v4.u32{r131,r130,r129,r128},[d18];mov.u32 r136,0;setp.ge.s32 p17,r6,",
    "r5;@p17 bra L26;ld.param.u64 d36,[d46+8];cvta.to.global.u64 d37,d36;add.s64 d39,d37,d35;",
    "ld.global.v4.u32{r132,r133,r134,r135},[d39];mov.u32 r136,1;bra L26;L6:mov.u32 r136,0;",
    "mov.u32 r128,r135;mov.u32 r129,r134;mov.u32 r130,r133;mov.u32 r131,r132;bra L26;L8:",
    "setp.eq.s64 p9,d14,0;mov.u32 r131,0;@!p9 ld.global.u16 r131,[d18];setp.lt.u64 p10,d14,2;",
    "@p10 bra L12;ld.global.u16 r66,[d18+2];shl.b32 r67,r66,16;or.b32 r131,r67,r131;L12:",
    "setp.lt.u64 p11,d14,3;mov.u32 r130,0;@!p11 ld.global.u16 r130,[d18+4];setp.lt.u64 p12,d14,",
    "4;@p12 bra L16;ld.global.u16 r69,[d18+6];shl.b32 r70,r69,16;or.b32 r130,r70,r130;L16:",
    "setp.lt.u64 p13,d14,5;mov.u32 r129,0;@!p13 ld.global.u16 r129,[d18+8];setp.lt.u64 p14,d14,",
    "6;@p14 bra L20;ld.global.u16 r72,[d18+10];shl.b32 r73,r72,16;or.b32 r129,r73,r129;L20:",
    "setp.lt.u64 p15,d14,7;mov.u32 r136,0;mov.u32 r128,r136;@!p15 ld.global.u16 r128,[d18+12];",
    "setp.lt.u64 p16,d14,8;@p16 bra L26;ld.global.u16 r77,[d18+14];shl.b32 r78,r77,16;or.b32 ",
    "r128,r78,r128;L26:setp.eq.s32 p18,r4,3;selp.b32 r89,-2147450880,0,p18;xor.b32 r90,r131,r89;",
    "xor.b32 r91,r130,r89;xor.b32 r92,r129,r89;xor.b32 r93,r128,r89;cvt.u16.u32 h1,r90;",
    "cvt.f32.f16 f34,h1;shr.u32 r94,r90,16;cvt.u16.u32 h2,r94;cvt.f32.f16 f33,h2;cvt.u16.u32 h3,",
    "r91;cvt.f32.f16 f32,h3;shr.u32 r95,r91,16;cvt.u16.u32 h4,r95;cvt.f32.f16 f31,h4;",
    "cvt.u16.u32 h5,r92;cvt.f32.f16 f30,h5;shr.u32 r96,r92,16;cvt.u16.u32 h6,r96;cvt.f32.f16 ",
    "f29,h6;cvt.u16.u32 h7,r93;cvt.f32.f16 f28,h7;shr.u32 r97,r93,16;cvt.u16.u32 h8,r97;",
    "cvt.f32.f16 f27,h8;setp.ne.s32 p19,r4,16;@p19 bra L28;cvt.f64.f32 g2,f34;mul.rn.f64 g3,g2,",
    "g1;cvt.rn.f32.f64 f34,g3;cvt.f64.f32 g4,f33;mul.rn.f64 g5,g4,g1;cvt.rn.f32.f64 f33,g5;",
    "cvt.f64.f32 g6,f32;mul.rn.f64 g7,g6,g1;cvt.rn.f32.f64 f32,g7;cvt.f64.f32 g8,f31;mul.rn.f64 ",
    "g9,g8,g1;cvt.rn.f32.f64 f31,g9;cvt.f64.f32 g10,f30;mul.rn.f64 g11,g10,g1;cvt.rn.f32.f64 ",
    "f30,g11;cvt.f64.f32 g12,f29;mul.rn.f64 g13,g12,g1;cvt.rn.f32.f64 f29,g13;cvt.f64.f32 g14,",
    "f28;mul.rn.f64 g15,g14,g1;cvt.rn.f32.f64 f28,g15;cvt.f64.f32 g16,f27;mul.rn.f64 g17,g16,g1;",
    "cvt.rn.f32.f64 f27,g17;L28:@!p7 bra L29;mul.rn.f32 f123,f123,f34;mul.rn.f32 f122,f122,f33;",
    "mul.rn.f32 f121,f121,f32;mul.rn.f32 f120,f120,f31;mul.rn.f32 f119,f119,f30;mul.rn.f32 f118,",
    "f118,f29;mul.rn.f32 f117,f117,f28;mul.rn.f32 f116,f116,f27;bra L33;L29:@!p6 bra L30;",
    "setp.lt.f32 p22,f123,f34;setp.nan.f32 p23,f123,f123;or.pred p24,p22,p23;selp.f32 f123,f123,",
    "f34,p24;setp.nan.f32 p25,f122,f122;setp.lt.f32 p26,f122,f33;or.pred p27,p26,p25;selp.f32 ",
    "f122,f122,f33,p27;setp.nan.f32 p28,f121,f121;setp.lt.f32 p29,f121,f32;or.pred p30,p29,p28;",
    "selp.f32 f121,f121,f32,p30;setp.nan.f32 p31,f120,f120;setp.lt.f32 p32,f120,f31;or.pred p33,",
    "p32,p31;selp.f32 f120,f120,f31,p33;setp.nan.f32 p34,f119,f119;setp.lt.f32 p35,f119,f30;",
    "or.pred p36,p35,p34;selp.f32 f119,f119,f30,p36;setp.nan.f32 p37,f118,f118;setp.lt.f32 p38,",
    "f118,f29;or.pred p39,p38,p37;selp.f32 f118,f118,f29,p39;setp.nan.f32 p40,f117,f117;",
    "setp.lt.f32 p41,f117,f28;or.pred p42,p41,p40;selp.f32 f117,f117,f28,p42;setp.nan.f32 p43,",
    "f116,f116;setp.lt.f32 p44,f116,f27;or.pred p45,p44,p43;selp.f32 f116,f116,f27,p45;bra L33;",
    "L30:add.rn.f32 f123,f123,f34;add.rn.f32 f122,f122,f33;add.rn.f32 f121,f121,f32;add.rn.f32 ",
    "f120,f120,f31;add.rn.f32 f119,f119,f30;add.rn.f32 f118,f118,f29;add.rn.f32 f117,f117,f28;",
    "add.rn.f32 f116,f116,f27;L33:add.s32 r115,r6,1;add.s64 d46,d46,8;shl.b64 d20,d45,4;",
    "setp.lt.s32 p46,r6,r5;@p46 bra L5;setp.ne.s32 p47,r4,4;@p47 bra L36;div.rn.f32 f123,f123,",
    "f1;div.rn.f32 f122,f122,f1;div.rn.f32 f121,f121,f1;div.rn.f32 f120,f120,f1;div.rn.f32 f119,",
    "f119,f1;div.rn.f32 f118,f118,f1;div.rn.f32 f117,f117,f1;div.rn.f32 f116,f116,f1;L36:",
    "cvt.rn.f16.f32 h9,f123;cvt.rn.f16.f32 h10,f122;mov.b32 r100,{h9,h10};cvt.rn.f16.f32 h11,",
    "f121;cvt.rn.f16.f32 h12,f120;mov.b32 r101,{h11,h12};cvt.rn.f16.f32 h13,f119;cvt.rn.f16.f32 ",
    "h14,f118;mov.b32 r102,{h13,h14};cvt.rn.f16.f32 h15,f117;cvt.rn.f16.f32 h16,f116;mov.b32 ",
    "r103,{h15,h16};xor.b32 r49,r100,r89;xor.b32 r50,r101,r89;xor.b32 r51,r102,r89;xor.b32 r52,",
    "r103,r89;add.s64 d21,d40,d20;@!p1 bra L37;st.global.v4.u32[d21],{r49,r50,r51,r52};bra L54;",
    "L37:setp.eq.s64 p49,d14,0;@!p49 st.global.u16[d21],r49;setp.lt.u64 p50,d14,2;@p50 bra L41;",
    "shr.u32 r104,r49,16;st.global.u16[d21+2],r104;L41:setp.lt.u64 p51,d14,3;@!p51 ",
    "st.global.u16[d21+4],r50;setp.lt.u64 p52,d14,4;@p52 bra L45;shr.u32 r105,r50,16;",
    "st.global.u16[d21+6],r105;L45:setp.lt.u64 p53,d14,5;@!p53 st.global.u16[d21+8],r51;",
    "setp.lt.u64 p54,d14,6;@p54 bra L49;shr.u32 r106,r51,16;st.global.u16[d21+10],r106;L49:",
    "setp.lt.u64 p55,d14,7;@!p55 st.global.u16[d21+12],r52;setp.lt.u64 p56,d14,8;@p56 bra L54;",
    "shr.u32 r107,r52,16;st.global.u16[d21+14],r107;L54:setp.ne.s64 p57,d11,0;and.pred p58,p1,",
    "p57;cvta.to.global.u64 d41,d11;add.s64 d22,d41,d20;@!p58 bra L55;st.global.v4.u32[d22],{",
    "r49,r50,r51,r52};bra L73;L55:setp.eq.s64 p59,d11,0;@p59 bra L73;setp.eq.s64 p60,d14,0;",
    "@!p60 st.global.u16[d22],r49;setp.lt.u64 p61,d14,2;@p61 bra L60;shr.u32 r108,r49,16;",
    "st.global.u16[d22+2],r108;L60:setp.lt.u64 p62,d14,3;@!p62 st.global.u16[d22+4],r50;",
    "setp.lt.u64 p63,d14,4;@p63 bra L64;shr.u32 r109,r50,16;st.global.u16[d22+6],r109;L64:",
    "setp.lt.u64 p64,d14,5;@!p64 st.global.u16[d22+8],r51;setp.lt.u64 p65,d14,6;@p65 bra L68;",
    "shr.u32 r110,r51,16;st.global.u16[d22+10],r110;L68:setp.lt.u64 p66,d14,7;@!p66 ",
    "st.global.u16[d22+12],r52;setp.lt.u64 p67,d14,8;@p67 bra L73;shr.u32 r111,r52,16;",
    "st.global.u16[d22+14],r111;L73:mov.u32 r112,%nctaid.x;mul.wide.u32 d42,r112,r55;add.s64 ",
    "d45,d45,d42;shl.b64 d44,d45,3;setp.lt.u64 p68,d44,d8;@p68 bra L4;L74:ret;}.visible .entry ",
    "idist_reduce_bf16(.param .align 8 .b8 a[168]).maxntid 512,1,1{.reg .pred p<77>;.reg .f32 ",
    "f<122>;.reg .b32 r<229>;.reg .f64 g<18>;.reg .b64 d<47>;mov.b64 d25,a;mov.u32 r78,%ctaid.x;",
    "mov.u32 r79,%ntid.x;mul.wide.u32 d26,r78,r79;mov.u32 r80,%tid.x;cvt.u64.u32 d27,r80;",
    "add.s64 d45,d26,d27;add.s64 d3,d25,128;ld.param.u64 d28,[a+136];ld.param.u64 d29,[a+128];",
    "or.b64 d43,d28,d29;mov.u32 r198,0;ld.param.u32 r1,[a+160];L1:.pragma \"nounroll\";",
    "mul.wide.s32 d30,r198,8;add.s64 d31,d25,d30;ld.param.u64 d32,[d31];or.b64 d43,d32,d43;",
    "add.s32 r198,r198,1;setp.lt.s32 p2,r198,r1;@p2 bra L1;and.b64 d7,d43,15;ld.param.u32 r4,",
    "[d3+36];ld.param.u64 d8,[d3+16];shl.b64 d44,d45,3;setp.ge.u64 p3,d44,d8;@p3 bra L74;",
    "ld.param.f64 g1,[d3+24];ld.param.u64 d10,[d3];ld.param.u64 d11,[d3+8];ld.param.u32 r5,",
    "[d3+32];cvt.rn.f32.s32 f1,r5;or.b32 r87,r4,1;cvta.to.global.u64 d40,d10;L4:.pragma ",
    "\"nounroll\";sub.s64 d14,d8,d44;setp.gt.u64 p4,d14,7;setp.eq.s64 p5,d7,0;and.pred p1,p5,p4;",
    "mov.u32 r199,1;setp.eq.s32 p6,r87,3;selp.f32 f60,0f7F800000,0f80000000,p6;setp.eq.s32 p7,",
    "r4,1;selp.f32 f106,0f3F800000,f60,p7;mov.u32 r216,0;mov.u64 d46,d25;mov.f32 f107,f106;",
    "mov.f32 f108,f106;mov.f32 f109,f106;mov.f32 f110,f106;mov.f32 f111,f106;mov.f32 f112,f106;",
    "mov.f32 f113,f106;mov.u32 r217,r216;mov.u32 r218,r216;mov.u32 r219,r216;mov.u32 r220,r216;",
    "L5:.pragma \"nounroll\";mov.u32 r6,r199;setp.eq.s32 p8,r220,0;@!p8 bra L6;ld.param.u64 d33,",
    "[d46];cvta.to.global.u64 d34,d33;shl.b64 d35,d45,4;add.s64 d18,d34,d35;@!p1 bra L8;",
    "ld.global.v4.u32{r215,r214,r213,r212},[d18];mov.u32 r220,0;setp.ge.s32 p17,r6,r5;@p17 bra ",
    "L26;ld.param.u64 d36,[d46+8];cvta.to.global.u64 d37,d36;add.s64 d39,d37,d35;",
    "ld.global.v4.u32{r216,r217,r218,r219},[d39];mov.u32 r220,1;bra L26;L6:mov.u32 r220,0;",
    "mov.u32 r212,r219;mov.u32 r213,r218;mov.u32 r214,r217;mov.u32 r215,r216;bra L26;L8:",
    "setp.eq.s64 p9,d14,0;mov.u32 r215,0;@!p9 ld.global.u16 r215,[d18];setp.lt.u64 p10,d14,2;",
    "@p10 bra L12;ld.global.u16 r90,[d18+2];shl.b32 r91,r90,16;or.b32 r215,r91,r215;L12:",
    "setp.lt.u64 p11,d14,3;mov.u32 r214,0;@!p11 ld.global.u16 r214,[d18+4];setp.lt.u64 p12,d14,",
    "4;@p12 bra L16;ld.global.u16 r93,[d18+6];shl.b32 r94,r93,16;or.b32 r214,r94,r214;L16:",
    "setp.lt.u64 p13,d14,5;mov.u32 r213,0;@!p13 ld.global.u16 r213,[d18+8];setp.lt.u64 p14,d14,",
    "6;@p14 bra L20;ld.global.u16 r96,[d18+10];shl.b32 r97,r96,16;or.b32 r213,r97,r213;L20:",
    "setp.lt.u64 p15,d14,7;mov.u32 r220,0;mov.u32 r212,r220;@!p15 ld.global.u16 r212,[d18+12];",
    "setp.lt.u64 p16,d14,8;@p16 bra L26;ld.global.u16 r101,[d18+14];shl.b32 r102,r101,16;or.b32 ",
    "r212,r102,r212;L26:setp.eq.s32 p18,r4,3;selp.b32 r113,-2147450880,0,p18;xor.b32 r114,r215,",
    "r113;xor.b32 r115,r214,r113;xor.b32 r116,r213,r113;xor.b32 r117,r212,r113;shl.b32 r228,",
    "r114,16;and.b32 r70,r114,-65536;shl.b32 r69,r115,16;and.b32 r68,r115,-65536;shl.b32 r67,",
    "r116,16;and.b32 r66,r116,-65536;shl.b32 r65,r117,16;and.b32 r64,r117,-65536;setp.ne.s32 ",
    "p19,r4,16;@p19 bra L28;mov.b32 f61,r228;cvt.f64.f32 g2,f61;mul.rn.f64 g3,g2,g1;",
    "cvt.rn.f32.f64 f62,g3;mov.b32 r228,f62;mov.b32 f63,r70;cvt.f64.f32 g4,f63;mul.rn.f64 g5,g4,",
    "g1;cvt.rn.f32.f64 f64,g5;mov.b32 r70,f64;mov.b32 f65,r69;cvt.f64.f32 g6,f65;mul.rn.f64 g7,",
    "g6,g1;cvt.rn.f32.f64 f66,g7;mov.b32 r69,f66;mov.b32 f67,r68;cvt.f64.f32 g8,f67;mul.rn.f64 ",
    "g9,g8,g1;cvt.rn.f32.f64 f68,g9;mov.b32 r68,f68;mov.b32 f69,r67;cvt.f64.f32 g10,f69;",
    "mul.rn.f64 g11,g10,g1;cvt.rn.f32.f64 f70,g11;mov.b32 r67,f70;mov.b32 f71,r66;cvt.f64.f32 ",
    "g12,f71;mul.rn.f64 g13,g12,g1;cvt.rn.f32.f64 f72,g13;mov.b32 r66,f72;mov.b32 f73,r65;",
    "cvt.f64.f32 g14,f73;mul.rn.f64 g15,g14,g1;cvt.rn.f32.f64 f74,g15;mov.b32 r65,f74;mov.b32 ",
    "f75,r64;cvt.f64.f32 g16,f75;mul.rn.f64 g17,g16,g1;cvt.rn.f32.f64 f76,g17;mov.b32 r64,f76;",
    "L28:mov.b32 f11,r228;@!p7 bra L29;mul.rn.f32 f113,f113,f11;mov.b32 f91,r70;mul.rn.f32 f112,",
    "f112,f91;mov.b32 f92,r69;mul.rn.f32 f111,f111,f92;mov.b32 f93,r68;mul.rn.f32 f110,f110,f93;",
    "mov.b32 f94,r67;mul.rn.f32 f109,f109,f94;mov.b32 f95,r66;mul.rn.f32 f108,f108,f95;mov.b32 ",
    "f96,r65;mul.rn.f32 f107,f107,f96;mov.b32 f97,r64;mul.rn.f32 f106,f106,f97;bra L33;L29:@!p6 ",
    "bra L30;setp.lt.f32 p22,f113,f11;setp.nan.f32 p23,f113,f113;or.pred p24,p22,p23;selp.f32 ",
    "f113,f113,f11,p24;mov.b32 f84,r70;setp.lt.f32 p25,f112,f84;setp.nan.f32 p26,f112,f112;",
    "or.pred p27,p25,p26;selp.f32 f112,f112,f84,p27;mov.b32 f85,r69;setp.lt.f32 p28,f111,f85;",
    "setp.nan.f32 p29,f111,f111;or.pred p30,p28,p29;selp.f32 f111,f111,f85,p30;mov.b32 f86,r68;",
    "setp.lt.f32 p31,f110,f86;setp.nan.f32 p32,f110,f110;or.pred p33,p31,p32;selp.f32 f110,f110,",
    "f86,p33;mov.b32 f87,r67;setp.lt.f32 p34,f109,f87;setp.nan.f32 p35,f109,f109;or.pred p36,",
    "p34,p35;selp.f32 f109,f109,f87,p36;mov.b32 f88,r66;setp.lt.f32 p37,f108,f88;setp.nan.f32 ",
    "p38,f108,f108;or.pred p39,p37,p38;selp.f32 f108,f108,f88,p39;mov.b32 f89,r65;setp.lt.f32 ",
    "p40,f107,f89;setp.nan.f32 p41,f107,f107;or.pred p42,p40,p41;selp.f32 f107,f107,f89,p42;",
    "mov.b32 f90,r64;setp.lt.f32 p43,f106,f90;setp.nan.f32 p44,f106,f106;or.pred p45,p43,p44;",
    "selp.f32 f106,f106,f90,p45;bra L33;L30:add.rn.f32 f113,f113,f11;mov.b32 f77,r70;add.rn.f32 ",
    "f112,f112,f77;mov.b32 f78,r69;add.rn.f32 f111,f111,f78;mov.b32 f79,r68;add.rn.f32 f110,",
    "f110,f79;mov.b32 f80,r67;add.rn.f32 f109,f109,f80;mov.b32 f81,r66;add.rn.f32 f108,f108,f81;",
    "mov.b32 f82,r65;add.rn.f32 f107,f107,f82;mov.b32 f83,r64;add.rn.f32 f106,f106,f83;L33:",
    "add.s32 r199,r6,1;add.s64 d46,d46,8;shl.b64 d20,d45,4;setp.lt.s32 p46,r6,r5;@p46 bra L5;",
    "setp.ne.s32 p47,r4,4;@p47 bra L36;div.rn.f32 f113,f113,f1;div.rn.f32 f112,f112,f1;",
    "div.rn.f32 f111,f111,f1;div.rn.f32 f110,f110,f1;div.rn.f32 f109,f109,f1;div.rn.f32 f108,",
    "f108,f1;div.rn.f32 f107,f107,f1;div.rn.f32 f106,f106,f1;L36:mov.b32 r120,f113;shr.u32 r121,",
    "r120,16;and.b32 r122,r121,1;or.b32 r123,r120,4194304;add.s32 r124,r120,r122;add.s32 r125,",
    "r124,32767;setp.nan.f32 p49,f113,f113;selp.b32 r126,r123,r125,p49;shr.u32 r127,r126,16;",
    "mov.b32 r128,f112;shr.u32 r129,r128,16;and.b32 r130,r129,1;or.b32 r131,r128,4194304;",
    "add.s32 r132,r128,r130;add.s32 r133,r132,32767;setp.nan.f32 p50,f112,f112;selp.b32 r134,",
    "r131,r133,p50;and.b32 r135,r134,-65536;or.b32 r136,r127,r135;mov.b32 r137,f111;shr.u32 ",
    "r138,r137,16;and.b32 r139,r138,1;or.b32 r140,r137,4194304;add.s32 r141,r137,r139;add.s32 ",
    "r142,r141,32767;setp.nan.f32 p51,f111,f111;selp.b32 r143,r140,r142,p51;shr.u32 r144,r143,",
    "16;mov.b32 r145,f110;shr.u32 r146,r145,16;and.b32 r147,r146,1;or.b32 r148,r145,4194304;",
    "add.s32 r149,r145,r147;add.s32 r150,r149,32767;setp.nan.f32 p52,f110,f110;selp.b32 r151,",
    "r148,r150,p52;and.b32 r152,r151,-65536;or.b32 r153,r144,r152;mov.b32 r154,f109;shr.u32 ",
    "r155,r154,16;and.b32 r156,r155,1;or.b32 r157,r154,4194304;add.s32 r158,r154,r156;add.s32 ",
    "r159,r158,32767;setp.nan.f32 p53,f109,f109;selp.b32 r160,r157,r159,p53;shr.u32 r161,r160,",
    "16;mov.b32 r162,f108;shr.u32 r163,r162,16;and.b32 r164,r163,1;or.b32 r165,r162,4194304;",
    "add.s32 r166,r162,r164;add.s32 r167,r166,32767;setp.nan.f32 p54,f108,f108;selp.b32 r168,",
    "r165,r167,p54;and.b32 r169,r168,-65536;or.b32 r170,r161,r169;mov.b32 r171,f107;shr.u32 ",
    "r172,r171,16;and.b32 r173,r172,1;or.b32 r174,r171,4194304;add.s32 r175,r171,r173;add.s32 ",
    "r176,r175,32767;setp.nan.f32 p55,f107,f107;selp.b32 r177,r174,r176,p55;shr.u32 r178,r177,",
    "16;mov.b32 r179,f106;shr.u32 r180,r179,16;and.b32 r181,r180,1;or.b32 r182,r179,4194304;",
    "add.s32 r183,r179,r181;add.s32 r184,r183,32767;setp.nan.f32 p56,f106,f106;selp.b32 r185,",
    "r182,r184,p56;and.b32 r186,r185,-65536;or.b32 r187,r178,r186;xor.b32 r73,r136,r113;xor.b32 ",
    "r74,r153,r113;xor.b32 r75,r170,r113;xor.b32 r76,r187,r113;add.s64 d21,d40,d20;@!p1 bra L37;",
    "st.global.v4.u32[d21],{r73,r74,r75,r76};bra L54;L37:setp.eq.s64 p57,d14,0;@!p57 ",
    "st.global.u16[d21],r73;setp.lt.u64 p58,d14,2;@p58 bra L41;shr.u32 r188,r73,16;",
    "st.global.u16[d21+2],r188;L41:setp.lt.u64 p59,d14,3;@!p59 st.global.u16[d21+4],r74;",
    "setp.lt.u64 p60,d14,4;@p60 bra L45;shr.u32 r189,r74,16;st.global.u16[d21+6],r189;L45:",
    "setp.lt.u64 p61,d14,5;@!p61 st.global.u16[d21+8],r75;setp.lt.u64 p62,d14,6;@p62 bra L49;",
    "shr.u32 r190,r75,16;st.global.u16[d21+10],r190;L49:setp.lt.u64 p63,d14,7;@!p63 ",
    "st.global.u16[d21+12],r76;setp.lt.u64 p64,d14,8;@p64 bra L54;shr.u32 r191,r76,16;",
    "st.global.u16[d21+14],r191;L54:setp.ne.s64 p65,d11,0;and.pred p66,p1,p65;",
    "cvta.to.global.u64 d41,d11;add.s64 d22,d41,d20;@!p66 bra L55;st.global.v4.u32[d22],{r73,",
    "r74,r75,r76};bra L73;L55:setp.eq.s64 p67,d11,0;@p67 bra L73;setp.eq.s64 p68,d14,0;@!p68 ",
    "st.global.u16[d22],r73;setp.lt.u64 p69,d14,2;@p69 bra L60;shr.u32 r192,r73,16;",
    "st.global.u16[d22+2],r192;L60:setp.lt.u64 p70,d14,3;@!p70 st.global.u16[d22+4],r74;",
    "setp.lt.u64 p71,d14,4;@p71 bra L64;shr.u32 r193,r74,16;st.global.u16[d22+6],r193;L64:",
    "setp.lt.u64 p72,d14,5;@!p72 st.global.u16[d22+8],r75;setp.lt.u64 p73,d14,6;@p73 bra L68;",
    "shr.u32 r194,r75,16;st.global.u16[d22+10],r194;L68:setp.lt.u64 p74,d14,7;@!p74 ",
    "st.global.u16[d22+12],r76;setp.lt.u64 p75,d14,8;@p75 bra L73;shr.u32 r195,r76,16;",
    "st.global.u16[d22+14],r195;L73:mov.u32 r196,%nctaid.x;mul.wide.u32 d42,r196,r79;add.s64 ",
    "d45,d45,d42;shl.b64 d44,d45,3;setp.lt.u64 p76,d44,d8;@p76 bra L4;L74:ret;}.visible .entry ",
    "idist_pack_halves(.param .align 8 .b8 a[56]).maxntid 512,1,1{.reg .pred p<10>;.reg .b16 ",
    "h<11>;.reg .f32 f<5>;.reg .b32 r<33>;.reg .b64 d<56>;ld.param.u32 r3,[a+48];ld.param.u64 ",
    "d23,[a+24];ld.param.u64 d22,[a+16];ld.param.u64 d20,[a];cvta.to.global.u64 d1,d20;",
    "cvta.to.global.u64 d2,d22;mov.u32 r4,%ctaid.x;mov.u32 r5,%ntid.x;mul.wide.u32 d25,r4,r5;",
    "mov.u32 r6,%tid.x;cvt.u64.u32 d26,r6;add.s64 d55,d25,d26;setp.ge.u64 p1,d55,d23;@p1 bra ",
    "L12;setp.gt.s32 p2,r3,1;@!p2 bra L2;setp.eq.s32 p7,r3,2;@!p7 bra L8;mov.u32 r32,%nctaid.x;",
    "mul.wide.u32 d17,r32,r5;L11:shl.b64 d48,d55,1;add.s64 d49,d1,d48;ld.global.u16 h10,[d49];",
    "cvt.f32.f16 f4,h10;shl.b64 d50,d55,2;add.s64 d51,d2,d50;st.global.f32[d51],f4;add.s64 d55,",
    "d55,d17;setp.lt.u64 p9,d55,d23;@p9 bra L11;bra L12;L2:setp.eq.s32 p3,r3,0;@p3 bra L5;",
    "add.s64 d52,d25,d26;mov.u32 r10,%nctaid.x;mul.wide.u32 d5,r10,r5;L4:shl.b64 d30,d52,2;",
    "add.s64 d31,d1,d30;ld.global.f32 f2,[d31];mov.b32 r11,f2;shr.u32 r12,r11,16;and.b32 r13,",
    "r12,1;setp.nan.f32 p4,f2,f2;or.b32 r14,r11,4194304;add.s32 r15,r11,r13;add.s32 r16,r15,",
    "32767;selp.b32 r17,r14,r16,p4;shr.u32 r18,r17,16;shl.b64 d32,d52,1;add.s64 d33,d2,d32;",
    "st.global.u16[d33],r18;add.s64 d52,d52,d5;setp.lt.u64 p5,d52,d23;@p5 bra L4;bra L12;L8:",
    "add.s64 d54,d25,d26;mov.u32 r26,%nctaid.x;mul.wide.u32 d13,r26,r5;L9:shl.b64 d42,d54,1;",
    "add.s64 d43,d1,d42;ld.global.u16 r27,[d43];shl.b32 r28,r27,16;shl.b64 d44,d54,2;add.s64 ",
    "d45,d2,d44;st.global.u32[d45],r28;add.s64 d54,d54,d13;setp.lt.u64 p8,d54,d23;@p8 bra L9;",
    "bra L12;L5:add.s64 d53,d25,d26;mov.u32 r22,%nctaid.x;mul.wide.u32 d9,r22,r5;L6:shl.b64 d36,",
    "d53,2;add.s64 d37,d1,d36;ld.global.f32 f3,[d37];cvt.rn.f16.f32 h9,f3;shl.b64 d38,d53,1;",
    "add.s64 d39,d2,d38;st.global.u16[d39],h9;add.s64 d53,d53,d9;setp.lt.u64 p6,d53,d23;@p6 bra ",
    "L6;L12:ret;}.visible .entry idist_pack_bytes(.param .align 8 .b8 a[56]).maxntid 512,1,1{",
    ".reg .pred p<32>;.reg .b16 h<10>;.reg .f32 f<72>;.reg .b32 r<74>;.reg .b64 d<83>;",
    "ld.param.u32 r20,[a+48];ld.param.u32 r19,[a+44];ld.param.f32 f24,[a+40];ld.param.u64 d29,",
    "[a+32];ld.param.u64 d28,[a+24];ld.param.u64 d27,[a+16];ld.param.u64 d26,[a+8];ld.param.u64 ",
    "d25,[a];cvta.to.global.u64 d1,d25;cvta.to.global.u64 d2,d26;cvta.to.global.u64 d3,d27;",
    "mov.u32 r21,%ctaid.x;mov.u32 r22,%ntid.x;mul.wide.u32 d30,r21,r22;mov.u32 r23,%tid.x;",
    "cvt.u64.u32 d31,r23;add.s64 d32,d30,d31;shr.u64 d80,d32,5;shl.b64 d79,d80,10;setp.ge.u64 ",
    "p1,d79,d29;@p1 bra L26;L1:mul.lo.s64 d10,d80,1028;setp.eq.s32 p2,r20,0;@p2 bra L9;",
    "setp.gt.s32 p3,r19,0;@!p3 bra L3;cvt.u64.u32 d39,r21;cvt.u64.u32 d40,r22;mul.lo.s64 d41,",
    "d39,d40;add.s64 d43,d41,d31;cvt.u32.u64 r31,d43;and.b32 r69,r31,31;shr.u64 d44,d29,10;",
    "mul.lo.s64 d14,d44,1028;add.s64 d15,d1,d10;mov.f32 f68,0f00000000;L6:.pragma \"nounroll\";",
    "cvt.u64.u32 d45,r69;add.s64 d46,d79,d45;shl.b64 d47,d46,2;add.s64 d16,d2,d47;ld.global.f32 ",
    "f65,[d16];add.s32 r33,r69,4;cvt.u64.u32 d17,r33;mov.u32 r70,0;mov.u64 d82,d15;L7:.pragma ",
    "\"nounroll\";add.s64 d48,d82,d17;ld.global.s8 h9,[d48];cvt.rn.f32.s16 f31,h9;ld.global.f32 ",
    "f32,[d82];mul.rn.f32 f33,f32,f24;mul.rn.f32 f34,f31,f33;add.rn.f32 f65,f65,f34;add.s64 d82,",
    "d82,d14;add.s32 r70,r70,1;setp.lt.s32 p8,r70,r19;@p8 bra L7;st.global.f32[d16],f65;neg.f32 ",
    "f35,f65;setp.lt.f32 p9,f65,0f00000000;selp.f32 f36,f35,f65,p9;setp.gtu.f32 p10,f36,",
    "0f7F7FFFFF;selp.f32 f37,0f7F800000,f36,p10;setp.gt.f32 p11,f37,f68;selp.f32 f68,f37,f68,",
    "p11;add.s32 r69,r69,32;setp.lt.u32 p12,r69,1024;@p12 bra L6;bra L13;L9:cvt.u64.u32 d49,r21;",
    "cvt.u64.u32 d50,r22;mul.lo.s64 d51,d49,d50;add.s64 d53,d51,d31;cvt.u32.u64 r37,d53;and.b32 ",
    "r71,r37,31;mov.f32 f68,0f00000000;L10:.pragma \"nounroll\";cvt.u64.u32 d54,r71;add.s64 d20,",
    "d79,d54;shl.b64 d55,d20,2;add.s64 d21,d2,d55;ld.global.f32 f67,[d21];setp.ge.u64 p13,d20,",
    "d28;@p13 bra L12;add.s64 d57,d1,d55;ld.global.f32 f39,[d57];add.rn.f32 f67,f67,f39;L12:",
    "st.global.f32[d21],f67;neg.f32 f40,f67;setp.lt.f32 p14,f67,0f00000000;selp.f32 f41,f40,f67,",
    "p14;setp.gtu.f32 p15,f41,0f7F7FFFFF;selp.f32 f42,0f7F800000,f41,p15;setp.gt.f32 p16,f42,",
    "f68;selp.f32 f68,f42,f68,p16;add.s32 r71,r71,32;setp.lt.u32 p17,r71,1024;@p17 bra L10;bra ",
    "L13;L3:cvt.u32.u64 r27,d32;and.b64 d36,d32,31;add.s64 d37,d36,d79;shl.b64 d38,d37,2;",
    "add.s64 d81,d2,d38;and.b32 r68,r27,31;mov.f32 f68,0f00000000;L4:.pragma \"nounroll\";",
    "ld.global.f32 f26,[d81];setp.lt.f32 p4,f26,0f00000000;neg.f32 f27,f26;selp.f32 f28,f27,f26,",
    "p4;setp.gtu.f32 p5,f28,0f7F7FFFFF;selp.f32 f29,0f7F800000,f28,p5;setp.gt.f32 p6,f29,f68;",
    "selp.f32 f68,f29,f68,p6;add.s64 d81,d81,128;add.s32 r68,r68,32;setp.lt.u32 p7,r68,1024;@p7 ",
    "bra L4;L13:mov.b32 r38,f68;mov.u32 r39,31;mov.u32 r40,16;mov.u32 r41,-1;shfl.sync.bfly.b32 ",
    "r42|p18,r38,r40,r39,r41;mov.b32 f44,r42;max.f32 f45,f68,f44;mov.b32 r43,f45;mov.u32 r44,8;",
    "shfl.sync.bfly.b32 r45|p19,r43,r44,r39,r41;mov.b32 f46,r45;max.f32 f47,f45,f46;mov.b32 r46,",
    "f47;mov.u32 r47,4;shfl.sync.bfly.b32 r48|p20,r46,r47,r39,r41;mov.b32 f48,r48;max.f32 f49,",
    "f47,f48;mov.b32 r49,f49;mov.u32 r50,2;shfl.sync.bfly.b32 r51|p21,r49,r50,r39,r41;mov.b32 ",
    "f50,r51;max.f32 f51,f49,f50;mov.b32 r52,f51;mov.u32 r53,1;shfl.sync.bfly.b32 r54|p22,r52,",
    "r53,r39,r41;mov.b32 f52,r54;max.f32 f15,f51,f52;setp.gtu.f32 p23,f15,0f7F7FFFFF;mov.f32 ",
    "f69,0f7FC00000;@p23 bra L15;mov.f32 f53,0f42FE0000;div.rn.f32 f69,f15,f53;L15:setp.leu.f32 ",
    "p24,f69,0f00000000;mov.f32 f70,0f00000000;@p24 bra L17;mov.f32 f55,0f3F800000;div.rn.f32 ",
    "f70,f55,f69;L17:cvt.u64.u32 d58,r21;cvt.u64.u32 d59,r22;mul.lo.s64 d60,d58,d59;add.s64 d62,",
    "d60,d31;cvt.u32.u64 r58,d62;and.b32 r72,r58,31;setp.ne.s32 p25,r72,0;@p25 bra L19;add.s64 ",
    "d64,d3,d10;st.global.f32[d64],f69;L19:setp.gtu.f32 p26,f70,0f7F7FC99E;selp.f32 f20,",
    "0f00000000,f70,p26;L20:.pragma \"nounroll\";cvt.u64.u32 d70,r72;add.s64 d71,d79,d70;",
    "shl.b64 d72,d71,2;add.s64 d22,d2,d72;ld.global.f32 f21,[d22];mov.u32 r73,0;@p23 bra L22;",
    "mul.rn.f32 f56,f21,f20;setp.lt.f32 p28,f56,0f00000000;selp.f32 f57,0fBF000000,0f3F000000,",
    "p28;add.rn.f32 f58,f56,f57;cvt.rzi.s32.f32 r73,f58;L22:add.s32 r65,r72,4;cvt.u64.u32 d73,",
    "r65;add.s64 d75,d3,d10;add.s64 d76,d75,d73;st.global.u8[d76],r73;mov.f32 f71,0f00000000;",
    "@p23 bra L24;cvt.rn.f32.s32 f60,r73;mul.rn.f32 f61,f60,f69;neg.f32 f62,f61;add.rn.f32 f71,",
    "f21,f62;L24:st.global.f32[d22],f71;add.s32 r72,r72,32;setp.lt.u32 p30,r72,1024;@p30 bra ",
    "L20;mov.u32 r67,%nctaid.x;mul.wide.u32 d77,r67,r22;shr.u64 d78,d77,5;add.s64 d80,d80,d78;",
    "shl.b64 d79,d80,10;setp.lt.u64 p31,d79,d29;@p31 bra L1;L26:ret;}.visible .entry ",
    "idist_unpack_bytes(.param .align 8 .b8 a[56]).maxntid 512,1,1{.reg .pred p<3>;.reg .b16 ",
    "h<10>;.reg .f32 f<5>;.reg .b32 r<7>;.reg .b64 d<25>;ld.param.u64 d12,[a+24];ld.param.u64 ",
    "d11,[a+16];ld.param.u64 d9,[a];mov.u32 r3,%ctaid.x;mov.u32 r4,%ntid.x;cvt.u64.u32 d1,r4;",
    "mul.wide.u32 d14,r3,r4;mov.u32 r5,%tid.x;cvt.u64.u32 d15,r5;add.s64 d24,d14,d15;",
    "setp.ge.u64 p1,d24,d12;@p1 bra L3;cvta.to.global.u64 d4,d11;mov.u32 r6,%nctaid.x;",
    "cvt.u64.u32 d16,r6;mul.lo.s64 d5,d16,d1;cvta.to.global.u64 d6,d9;L2:shr.u64 d17,d24,10;",
    "mul.lo.s64 d18,d17,1028;add.s64 d19,d6,d18;and.b64 d20,d24,1023;add.s64 d21,d19,d20;",
    "ld.global.s8 h9,[d21+4];cvt.rn.f32.s16 f2,h9;ld.global.f32 f3,[d19];mul.rn.f32 f4,f2,f3;",
    "shl.b64 d22,d24,2;add.s64 d23,d4,d22;st.global.f32[d23],f4;add.s64 d24,d24,d5;setp.lt.u64 ",
    "p2,d24,d12;@p2 bra L2;L3:ret;}"};
// clang-format on
// End of what tests/gpu/make_ptx.sh made.

//------------------------------------------------------------------------------
// [ipc:kernel]  loading the kernels, and launching them
// uses clock mutex base:type model core:world gpu:types gpu:agree ptx
//------------------------------------------------------------------------------

#if IDIST__IPC_KERNELS
static bool idist__ipc_kernel_is_loaded(const idist__gpu *gpu) { return gpu->library != NULL; }

static void idist__ipc_kernel_unload(idist__gpu *gpu) {
    if (gpu->library) cudaLibraryUnload(gpu->library);
    gpu->library = NULL;
}

// Loads the kernels. The driver compiles a kernel when it is first needed, and that is now, because
// its attributes are asked for: PTX that the driver cannot read is no error of a call yet, and no
// launch waits.
static cudaError_t idist__ipc_kernel_load(idist__gpu *gpu) {
    static const char *const names[] = {"idist_reduce_f16",  "idist_reduce_bf16",
                                        "idist_reduce_f32",  "idist_reduce_f64",
                                        "idist_pack_halves", "idist_pack_bytes",
                                        "idist_unpack_bytes"};
    struct cudaFuncAttributes attributes;
    size_t i, nbytes = 1, at = 0;
    cudaError_t error;
    char *text;

    for (i = 0; i < IDIST__COUNT_OF(idist__ptx); i++) nbytes += strlen(idist__ptx[i]);
    if ((text = (char *)malloc(nbytes)) == NULL) return cudaErrorMemoryAllocation;
    for (i = 0; i < IDIST__COUNT_OF(idist__ptx); at += strlen(idist__ptx[i++]))
        memcpy(text + at, idist__ptx[i], strlen(idist__ptx[i]) + 1);
    error = cudaLibraryLoadData(&gpu->library, text, NULL, NULL, 0, NULL, NULL, 0);
    free(text);

    for (i = 0; i < IDIST__COUNT_OF(names) && error == cudaSuccess; i++) {
        error = cudaLibraryGetKernel(&gpu->kernels[i], gpu->library, names[i]);
        if (error != cudaSuccess) break;
        error = cudaFuncGetAttributes(&attributes, (const void *)gpu->kernels[i]);
    }

    if (error != cudaSuccess) idist__ipc_kernel_unload(gpu);

    return error;
}

// Launches a kernel with a thread for each of `count` items, or with fewer that take turns.
static cudaError_t idist__ipc_kernel_launch(const idist__gpu *gpu, int kernel, const void *args,
                                            size_t count, cudaStream_t stream) {
    void *params[1];
    dim3 grid, block;

    params[0] = (void *)(uintptr_t)args;
    block.x = IDIST__PTX_THREADS;
    grid.x = (unsigned)(count / IDIST__PTX_THREADS < 1024 ? count / IDIST__PTX_THREADS + 1 : 1024);
    grid.y = grid.z = block.y = block.z = 1;
    return cudaLaunchKernel((const void *)gpu->kernels[kernel], grid, block, params, 0, stream);
}

// Reduces on the device. The caller sets out, count and also; each operand in[i] that is NULL is at
// offset `at` of rank i's arena.
static cudaError_t idist__ipc_kernel_reduce(const idist__task *t, char *const *arena, size_t at,
                                            idist__ptx_args *args) {
    const idist_group *g = t->group;
    const idist__call *c = &idist__gpu_op_of(t)->call;
    const idist__gpu *gpu = idist__gpu_of(g->w);
    size_t size = idist_dtype_size(c->dtype), nbytes = args->count * size;
    cudaStream_t stream = idist__gpu_group_of(g)->stream[IDIST__STREAM_OUT];
    cudaError_t error = cudaSuccess;
    void *out = args->out, *away = NULL;
    int i;

    if (!args->count) return cudaSuccess;

    for (i = 0; i < g->size; i++)
        if (!args->in[i]) args->in[i] = arena[i] + at;
    args->n = g->size;
    args->op = c->op <= IDIST_AVG ? (int)c->op : IDIST_SUM;

    // The kernel needs its output aligned to an element.
    if ((uintptr_t)out % size) error = cudaMallocAsync(&away, nbytes, stream);
    if (away) args->out = away;
    if (error == cudaSuccess)
        error =
            idist__ipc_kernel_launch(gpu, (int)c->dtype - IDIST_F16, args, args->count / 4, stream);
    if (error == cudaSuccess && away)
        error = cudaMemcpyAsync(out, away, nbytes, cudaMemcpyDefault, stream);
    if (away) cudaFreeAsync(away, stream);

    return error;
}

static cudaError_t idist__ipc_kernel_scale(const idist__gpu *gpu, void *data, size_t count,
                                           idist_dtype dtype, double factor, cudaStream_t stream) {
    idist__ptx_args args;

    memset(&args, 0, sizeof args);
    args.in[0] = args.out = data;
    args.count = count;
    args.n = 1;
    args.op = IDIST__PTX_SCALED;
    args.factor = factor;

    return count ? idist__ipc_kernel_launch(gpu, (int)dtype - IDIST_F16, &args, count / 4, stream)
                 : cudaSuccess;
}
#else
static bool idist__ipc_kernel_is_loaded(const idist__gpu *gpu) {
    (void)gpu;
    return false;
}
static cudaError_t idist__ipc_kernel_load(idist__gpu *gpu) {
    (void)gpu;
    return cudaErrorNotSupported;
}
static void idist__ipc_kernel_unload(idist__gpu *gpu) { (void)gpu; }
static cudaError_t idist__ipc_kernel_reduce(const idist__task *t, char *const *arena, size_t at,
                                            idist__ptx_args *args) {
    (void)t;
    (void)arena;
    (void)at;
    (void)args;
    return cudaErrorNotSupported;
}
static cudaError_t idist__ipc_kernel_scale(const idist__gpu *gpu, void *data, size_t count,
                                           idist_dtype dtype, double factor, cudaStream_t stream) {
    (void)gpu;
    (void)data;
    (void)count;
    (void)dtype;
    (void)factor;
    (void)stream;
    return cudaErrorNotSupported;
}
static cudaError_t idist__ipc_kernel_launch(const idist__gpu *gpu, int kernel, const void *args,
                                            size_t count, cudaStream_t stream) {
    (void)gpu;
    (void)kernel;
    (void)args;
    (void)count;
    (void)stream;
    return cudaErrorNotSupported;
}
#endif

static bool idist__ipc_kernel_has_loaded(const void *arg) {
    const idist__world *w = (const idist__world *)arg;
    return !idist__gpu_of(w)->loading || w->thread_stops;
}

// Loads the kernels once per world. The lock is held, and released meanwhile: loading may wait for
// the device, where a kernel of NCCL's may wait for a lost rank, and whoever aborts that needs the
// lock. The caller is counted in gpu->user_count.
static cudaError_t idist__ipc_kernel_need(idist__world *w) {
    idist__gpu *gpu = idist__gpu_of(w);
    int most_ms = w->cfg.init_timeout_ms > 0 ? w->cfg.init_timeout_ms : IDIST__IPC_LOAD_MS;
    cudaError_t error;

    if (!idist__gpu_agree_wait_until(w, idist__ipc_kernel_has_loaded, w,
                                     idist__os_clock_deadline(most_ms)))
        return cudaErrorNotReady;
    if (gpu->loading) return cudaErrorNotReady;
    if (idist__ipc_kernel_is_loaded(gpu)) return cudaSuccess;

    gpu->loading = true;
    idist__os_mutex_unlock(&w->lock);
    error = idist__ipc_kernel_load(gpu);
    idist__world_lock(w);
    gpu->loading = false;

    return error;
}

//------------------------------------------------------------------------------
// [ipc:arena]  device memory that other ranks map
// uses mutex process mem hash model core:world gpu:types
//
// Each rank of a group has an arena: IDIST__IPC_SLOTS chunks of device memory, which the other
// members map once. Each of these calls of CUDA may wait for all work of the device, so they are
// made without the lock.
//------------------------------------------------------------------------------

// What each member tells the others about its arena.
typedef struct idist__ipc_rank_info {
    cudaIpcMemHandle_t handle;
    char *data; // for ranks of the same process, which cannot open it
    uint64_t process;
    int32_t device;
    uint32_t serial;
    int32_t failed; // there is nothing to map; the reason comes later
} idist__ipc_rank_info;

// Equal for ranks of the same process only. Processes in different containers may have the same
// number.
static uint64_t idist__ipc_arena_process(void) {
    return idist__hash_mix((uint64_t)idist__os_process_id(), idist__os_process_space());
}

// Takes an arena of our own for the group: one of a closed group, or a new one. Releases the lock
// while it allocates.
static cudaError_t idist__ipc_arena_take(idist_group *g, idist__ipc_rank_info *info) {
    idist__gpu *gpu = idist__gpu_of(g->w);
    idist__ipc_arena *a = gpu->arenas;
    cudaError_t error = cudaSuccess;

    if (a) {
        gpu->arenas = a->next;
    } else {
        a = (idist__ipc_arena *)idist__mem_alloc(&g->w->cfg.mem, sizeof *a);
        if (!a) return cudaErrorMemoryAllocation;
        idist__os_mutex_unlock(&g->w->lock);
        error = cudaMalloc((void **)&a->data, IDIST__IPC_SLOTS * IDIST__IPC_CHUNK);
        idist__world_lock(g->w);
        if (error == cudaSuccess) a->serial = ++gpu->arena_count;
    }

    if (error != cudaSuccess) {
        idist__mem_free(&g->w->cfg.mem, a);
        return error;
    }

    idist__gpu_group_of(g)->own_arena = a;
    info->data = a->data;
    info->device = gpu->device;
    info->serial = a->serial;

    return g->size > 1 ? cudaIpcGetMemHandle(&info->handle, a->data) : cudaSuccess;
}

// Maps an arena of another rank, if it is not mapped yet. Releases the lock meanwhile.
static cudaError_t idist__ipc_arena_map(idist__world *w, int rank, const idist__ipc_rank_info *info,
                                        char **at) {
    idist__gpu *gpu = idist__gpu_of(w);
    idist__ipc_arena *a;
    cudaError_t error;

    for (a = gpu->imports; a && (a->rank != rank || a->serial != info->serial); a = a->next)
        continue;

    if (a) {
        *at = a->data;
        return cudaSuccess;
    }

    a = (idist__ipc_arena *)idist__mem_alloc(&w->cfg.mem, sizeof *a);
    if (!a) return cudaErrorMemoryAllocation;
    idist__os_mutex_unlock(&w->lock);
    error = cudaIpcOpenMemHandle((void **)&a->data, info->handle, cudaIpcMemLazyEnablePeerAccess);
    idist__world_lock(w);

    if (error != cudaSuccess) {
        idist__mem_free(&w->cfg.mem, a);
        return error;
    }

    a->rank = rank;
    a->serial = info->serial;
    a->next = gpu->imports;
    gpu->imports = a;
    *at = a->data;

    return cudaSuccess;
}

// Maps the arenas of all other ranks of the group. Releases the lock meanwhile.
static cudaError_t idist__ipc_arena_map_all(idist_group *g, const idist__ipc_rank_info *infos) {
    idist__gpu_group *gg = idist__gpu_group_of(g);
    cudaError_t error = cudaSuccess;
    int i;

    for (i = 0; i < g->size && error == cudaSuccess; i++) {
        gg->arena[i] = infos[i].data;
        if (infos[i].failed) return cudaSuccess;

        if (infos[i].process != infos[g->rank].process) {
            error = idist__ipc_arena_map(g->w, g->ranks[i], &infos[i], &gg->arena[i]);
        } else if (infos[i].device != infos[g->rank].device) {
            idist__os_mutex_unlock(&g->w->lock);
            error = cudaDeviceEnablePeerAccess(infos[i].device, 0);
            idist__world_lock(g->w);
        }

        if (error == cudaErrorPeerAccessAlreadyEnabled) error = cudaSuccess;
    }

    return error;
}

static void idist__ipc_arena_release(idist_group *g) {
    idist__gpu *gpu = idist__gpu_of(g->w);
    idist__gpu_group *gg = idist__gpu_group_of(g);

    if (!gg->own_arena) return;
    gg->own_arena->next = gpu->arenas;
    gpu->arenas = gg->own_arena;
    gg->own_arena = NULL;
}

// Abandons the arena of a group in which a copy never ends, on this rank or on another: no other
// group gets it, and it is never freed.
static void idist__ipc_arena_abandon(idist_group *g) {
    idist__gpu_group *gg = idist__gpu_group_of(g);

    idist__mem_free(&g->w->cfg.mem, gg->own_arena);
    gg->own_arena = NULL;
}

//------------------------------------------------------------------------------
// [ipc:leave]  the end of a world: giving the memory back
// uses clock os:thread mutex mem base:log model core:world gpu:types device
// uses pinned gpu:agree kernel
//
//     idist_finalize      idist__ipc_leave_unmap_arenas   this rank maps nothing any more
//                         the ranks meet            nobody maps our own arenas any more
//     groups are closed   [gpu:leave]               other threads leave
//     world is freed      idist__ipc_leave_free_all       all memory that the device knows
//------------------------------------------------------------------------------

// What a thread of its own gives back to the device, because each of these calls may wait for all
// work of the device.
typedef struct idist__ipc_cleanup {
    idist__gpu gpu; // only the device, and what is given back: imports, arenas, library,
                    // free_pinned, barrier_word, pool
    int state;      // atomic: IDIST__JOB_STATE_*
} idist__ipc_cleanup;

static void *idist__ipc_leave_cleanup_run(void *arg) {
    idist__ipc_cleanup *job = (idist__ipc_cleanup *)arg;
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    const idist__ipc_arena *a;
    const idist__pinned *p;

    cudaSetDevice(job->gpu.device);
    cudaThreadExchangeStreamCaptureMode(&mode);
    for (a = job->gpu.imports; a; a = a->next) cudaIpcCloseMemHandle(a->data);
    for (a = job->gpu.arenas; a; a = a->next) cudaFree(a->data);
    for (p = job->gpu.free_pinned; p; p = p->next)
        if (p->is_pinned) cudaHostUnregister(p->data);
    cudaFree(job->gpu.barrier_word);
    if (job->gpu.pool) cudaMemPoolDestroy(job->gpu.pool);
    idist__ipc_kernel_unload(&job->gpu);

    if (__atomic_exchange_n(&job->state, IDIST__JOB_STATE_DONE, __ATOMIC_ACQ_REL) ==
        IDIST__JOB_STATE_LEFT)
        free(job);

    return NULL;
}

// Gives back what `what` lists, in a thread of its own, and waits for it up to IDIST__GPU_ABORT_MS.
// False: the device is busy and the thread goes on by itself, or there is no such thread. Called
// without the lock.
static bool idist__ipc_leave_clean_up(const idist__gpu *what) {
    idist__ipc_cleanup *job = (idist__ipc_cleanup *)calloc(1, sizeof *job);
    int64_t deadline = idist__os_clock_deadline(IDIST__GPU_ABORT_MS);
    idist__os_thread thread;
    int turns = 0;

    if (!job) return false;
    job->gpu = *what;

    if (idist__os_thread_start(&thread, idist__ipc_leave_cleanup_run, job) != 0) {
        free(job);
        return false;
    }

    while (!__atomic_load_n(&job->state, __ATOMIC_ACQUIRE) && idist__os_clock_now_ns() < deadline)
        idist__gpu_device_nap(&turns);

    if (__atomic_exchange_n(&job->state, IDIST__JOB_STATE_LEFT, __ATOMIC_ACQ_REL) !=
        IDIST__JOB_STATE_DONE) {
        idist__os_thread_detach(thread); // it frees the job
        return false;
    }

    idist__os_thread_join(thread);
    free(job);

    return true;
}

static void idist__ipc_leave_free_list(const idist__world *w, idist__ipc_arena *list) {
    idist__ipc_arena *a;

    while ((a = list) != NULL) {
        list = a->next;
        idist__mem_free(&w->cfg.mem, a);
    }
}

// Whether no thread of this rank reads, or is about to read, the memory of other ranks.
static bool idist__ipc_leave_is_idle(const void *arg) {
    const idist__world *w = (const idist__world *)arg;
    const idist_group *g;
    const idist__task *t;

    for (t = w->tasks; t; t = t->next)
        if (t->on_device && idist__gpu_op_of(t)->path == IDIST__BY_IPC) return false;

    for (g = &w->group; g; g = g->next) {
        const idist__gpu_group *gg = idist__gpu_group_of(g);
        if (gg && gg->preparing && gg->path == IDIST__BY_IPC) return false;
    }

    return true;
}

// Unmaps the arenas of the other ranks, which free them when all ranks have done so. Waits for the
// calls of other threads to end.
static void idist__ipc_leave_unmap_arenas(idist__world *w) {
    idist__gpu *gpu = idist__gpu_of(w);
    idist__gpu what;
    bool closed;

    if (!idist__gpu_agree_wait_until(w, idist__ipc_leave_is_idle, w,
                                     idist__os_clock_deadline(IDIST__GPU_ABORT_MS))) {
        idist__log_print(&w->log, IDIST_LOG_WARN,
                         "finalize: another thread's call still reads the memory of other ranks");
        return;
    }

    gpu->closed = true;
    if (!gpu->imports || gpu->stuck) return;
    memset(&what, 0, sizeof what);
    what.device = gpu->device;
    what.imports = gpu->imports;
    gpu->imports = NULL;

    idist__os_mutex_unlock(&w->lock);
    closed = idist__ipc_leave_clean_up(&what);
    idist__world_lock(w);
    if (closed) idist__ipc_leave_free_list(w, what.imports);
    else gpu->stuck = true;
}

// Gives back what this rank has. Each of these calls may wait for the device, on which a kernel of
// NCCL's may still run that could not be aborted.
static void idist__ipc_leave_free_all(idist__world *w) {
    idist__gpu *gpu = idist__gpu_of(w);
    // If the device is stuck, a thread may still load the kernels.
    bool any = !gpu->stuck && (gpu->imports || gpu->arenas || gpu->free_pinned ||
                               gpu->barrier_word || gpu->pool || idist__ipc_kernel_is_loaded(gpu));
    bool busy = any && !idist__ipc_leave_clean_up(gpu);

    if (!busy && !w->abandoned) { // else a thread still reads the lists
        idist__ipc_leave_free_list(w, gpu->imports);
        idist__ipc_leave_free_list(w, gpu->arenas);
        idist__pinned_free_list(w, gpu->free_pinned);
        idist__pinned_free_list(w, gpu->abandoned_pinned);
    }

    gpu->stuck = gpu->stuck || busy;
    if (!gpu->stuck) return;
    idist__log_print(
        &w->log, IDIST_LOG_WARN,
        "GPU %d does not finish its work: memory on it stays in use until the process ends",
        gpu->device);
}

//------------------------------------------------------------------------------
// [ipc:probe]  does this rank read what the others have written?
// uses clock hash model gpu:types device ptx kernel
//
// What each rank leaves in its arena, for the others to check that they read it: whole numbers,
// never 0, and so small that their sum is exact. A driver that grants peer access does not know
// whether the machine delivers: an IOMMU, or the access control (ACS) of a PCIe switch, makes zeros
// or garbage of what one GPU reads from another, without an error.
//------------------------------------------------------------------------------

#define IDIST__IPC_PROBE 4096
#define IDIST__IPC_PROBE_MS 10000 // how long reading it may take

static float idist__ipc_probe_value(int rank, size_t i) {
    uint64_t mixed = idist__hash_mix((uint64_t)rank + 1, i);
    return (float)((mixed & 0xfffff) | 1);
}

typedef struct idist__ipc_probe {
    cudaStream_t stream; // its own: if a copy never ends, it is abandoned
    float *seen;         // pinned
    int64_t deadline_ns;
    char text[200];
} idist__ipc_probe;

// Starts the deadline, once for each part of the probe: the ranks may begin a part at very
// different times.
static void idist__ipc_probe_set_deadline(const idist__world *w, idist__ipc_probe *probe) {
    int most_ms = w->cfg.init_timeout_ms / 2;

    if (most_ms <= 0 || most_ms > IDIST__IPC_PROBE_MS) most_ms = IDIST__IPC_PROBE_MS;
    probe->deadline_ns = idist__os_clock_deadline(most_ms);
}

// True: the stream has finished. It may never do so.
static bool idist__ipc_probe_wait(const idist__ipc_probe *probe, cudaError_t *error) {
    int turns = 0;

    while (*error == cudaSuccess) {
        *error = cudaStreamQuery(probe->stream);
        if (*error == cudaSuccess) return true;
        if (*error != cudaErrorNotReady || idist__os_clock_now_ns() > probe->deadline_ns)
            return false;
        *error = cudaSuccess;
        idist__gpu_device_nap(&turns);
    }

    return false;
}

static cudaError_t idist__ipc_probe_write(const idist_group *g, idist__ipc_probe *probe) {
    size_t i, nbytes = IDIST__IPC_PROBE * sizeof(float);
    char *at = idist__gpu_group_of(g)->own_arena->data;
    cudaError_t error = cudaStreamCreateWithFlags(&probe->stream, cudaStreamNonBlocking);

    if (error == cudaSuccess) error = cudaMallocHost((void **)&probe->seen, nbytes);
    if (error != cudaSuccess) return error;

    idist__ipc_probe_set_deadline(g->w, probe);
    for (i = 0; i < IDIST__IPC_PROBE; i++) probe->seen[i] = idist__ipc_probe_value(g->rank, i);
    error = cudaMemcpyAsync(at, probe->seen, nbytes, cudaMemcpyDefault, probe->stream);
    idist__ipc_probe_wait(probe, &error);

    return error;
}

// Copies the device's memory at `from` to the host and checks it: the pattern of a rank, or the sum
// of all (rank -1).
static bool idist__ipc_probe_check(const idist_group *g, idist__ipc_probe *probe, const char *from,
                                   int rank, cudaError_t *error) {
    size_t i, nbytes = IDIST__IPC_PROBE * sizeof(float);
    int k, first = rank < 0 ? 0 : rank, last = rank < 0 ? g->size - 1 : rank;
    float want;

    if (*error == cudaSuccess)
        *error = cudaMemcpyAsync(probe->seen, from, nbytes, cudaMemcpyDefault, probe->stream);
    if (!idist__ipc_probe_wait(probe, error)) return false;

    for (i = 0; i < IDIST__IPC_PROBE; i++) {
        for (want = 0, k = first; k <= last; k++) want += idist__ipc_probe_value(k, i);
        if (probe->seen[i] != want) return false;
    }

    return true;
}

// Checks that this rank reads the arenas of all ranks: by copies from device to device, and with a
// kernel. (A copy to the host would prove nothing: the device that owns the memory makes it.)
static cudaError_t idist__ipc_probe_read(const idist_group *g, idist__ipc_probe *probe) {
    const idist__gpu *gpu = idist__gpu_of(g->w);
    const idist__gpu_group *gg = idist__gpu_group_of(g);
    const char *mine = gpu->rank_infos[g->ranks[g->rank]].bus_id, *other = mine, *cause = "";
    size_t nbytes = IDIST__IPC_PROBE * sizeof(float);
    char *copied = gg->own_arena->data + nbytes, *sum = copied + nbytes;
    cudaError_t error = cudaSuccess;
    idist__ptx_args args;
    bool right = true;
    int i;

    idist__ipc_probe_set_deadline(g->w, probe);
    memset(&args, 0, sizeof args);

    for (i = 0; i < g->size && right; i++) {
        args.in[i] = gg->arena[i];
        other = gpu->rank_infos[g->ranks[i]].bus_id;
        error = cudaMemcpyAsync(copied, gg->arena[i], nbytes, cudaMemcpyDefault, probe->stream);
        right = idist__ipc_probe_check(g, probe, copied, i, &error);
    }

    if (right) {
        args.out = sum;
        args.count = IDIST__IPC_PROBE;
        args.n = g->size;
        args.op = IDIST_SUM;
        error =
            idist__ipc_kernel_launch(gpu, IDIST_F32 - IDIST_F16, &args, args.count, probe->stream);
        right = idist__ipc_probe_check(g, probe, sum, -1, &error);
        for (i = 0; i < g->size && !right && !strcmp(mine, other); i++)
            other = gpu->rank_infos[g->ranks[i]].bus_id; // one that may be the cause
    }

    if (right || (error != cudaSuccess && error != cudaErrorNotReady)) return error;

    if (strcmp(mine, other))
        cause = ": an IOMMU or PCIe ACS is in the way; boot with iommu=pt, or disable ACS";
    snprintf(probe->text, sizeof probe->text, "GPU %.16s %s GPU %.16s%s", mine,
             error == cudaSuccess ? "reads wrong data from" : "timed out reading from", other,
             cause);

    return cudaErrorUnknown;
}

// False: the stream has not finished. It may never do so: it is abandoned, with the memory it works
// on.
static bool idist__ipc_probe_free(idist__ipc_probe *probe) {
    cudaError_t error = cudaSuccess;
    bool done =
        !probe->stream || idist__ipc_probe_wait(probe, &error) || error != cudaErrorNotReady;

    if (probe->stream && done) {
        cudaStreamDestroy(probe->stream);
        cudaFreeHost(probe->seen);
    }

    cudaGetLastError();

    return done;
}

//------------------------------------------------------------------------------
// [ipc:setup]  what the members of a group set up in its first call
// uses mutex fail text mem base:log model core:world gpu:types gpu:agree
// uses gpu:leave kernel arena probe
//
//     own     load the kernels; take an arena, and write a pattern into it
//     others  exchange the handles; map the arenas of the others, and read the patterns
//     agree   if any rank has failed, the group is staged
//------------------------------------------------------------------------------

// What happens to a group in which a rank cannot use IPC.
static idist_status idist__ipc_setup_without(idist_group *g, const char *reason) {
    idist__ipc_arena_release(g); // a later call of the group may set it up again
    if (idist__gpu_of(g->w)->rank_infos[0].wanted_backend == IDIST__BY_IPC)
        return idist__fail(IDIST_ERR_UNSUPPORTED,
                           "CUDA IPC cannot be used: %s; IDIST_DEVICE_BACKEND=staged needs no IPC",
                           reason);
    idist__log_print(&g->w->log, IDIST_LOG_WARN,
                     "CUDA IPC cannot be used (%s): device memory is staged", reason);
    idist__gpu_group_of(g)->path = IDIST__BY_STAGING;

    return IDIST_OK;
}

typedef struct idist__ipc_setup {
    idist__ipc_rank_info mine, *infos; // of all ranks
    idist__ipc_probe probe;
    bool stuck;        // the probe never ends
    cudaError_t error; // of this rank
} idist__ipc_setup;

// This rank's part: the kernels, and an arena with a pattern in it. Releases the lock meanwhile.
static void idist__ipc_setup_own(idist_group *g, idist__ipc_setup *setup) {
    idist__world *w = g->w;
    const idist__gpu *gpu = idist__gpu_of(w);

    setup->mine.process = idist__ipc_arena_process();
    setup->error = gpu->stuck || gpu->closed ? cudaErrorNotReady : idist__ipc_kernel_need(w);
    if (setup->error == cudaSuccess) setup->error = idist__ipc_arena_take(g, &setup->mine);
    idist__os_mutex_unlock(&w->lock);
    if (setup->error == cudaSuccess && g->size > 1)
        setup->error = idist__ipc_probe_write(g, &setup->probe);
    idist__world_lock(w);
    setup->mine.failed = setup->error != cudaSuccess;
}

// Maps the arenas of the others and reads them once. Releases the lock meanwhile.
static idist_status idist__ipc_setup_others(idist_group *g, idist__ipc_setup *setup) {
    idist__world *w = g->w;
    idist_status status =
        idist__gpu_agree_exchange(g, &setup->mine, setup->infos, sizeof setup->mine);
    bool all_have_arenas = status == IDIST_OK && g->size > 1;
    int i;

    if (status == IDIST_OK && setup->error == cudaSuccess)
        setup->error = idist__ipc_arena_map_all(g, setup->infos);
    for (i = 0; i < g->size && all_have_arenas; i++) all_have_arenas = !setup->infos[i].failed;
    if (!all_have_arenas || setup->error != cudaSuccess) return status;

    idist__os_mutex_unlock(&w->lock);
    setup->error = idist__ipc_probe_read(g, &setup->probe);
    idist__world_lock(w);

    return status;
}

// A probe that never ends on one rank may read the arena of any other: all ranks abandon theirs.
static idist_status idist__ipc_setup_strand_all(idist_group *g, idist__ipc_setup *setup) {
    idist_status status;
    bool any = false;
    int i;

    setup->mine.failed = setup->stuck;
    status = idist__gpu_agree_exchange(g, &setup->mine, setup->infos, sizeof setup->mine);
    for (i = 0; i < g->size && status == IDIST_OK; i++) any = any || setup->infos[i].failed;
    if (any) idist__ipc_arena_abandon(g);

    return status;
}

// The same outcome for all members.
static idist_status idist__ipc_setup_agree(idist_group *g, idist__ipc_setup *setup) {
    bool failed = setup->error != cudaSuccess, all = false;
    char reason[256] = "";
    idist_status status;

    if (failed) idist__text_copy(reason, sizeof reason, cudaGetErrorString(setup->error));
    if (setup->probe.text[0]) idist__text_copy(reason, sizeof reason, setup->probe.text);
    status = idist__gpu_agree_all_succeeded(g, failed, reason, sizeof reason, &all);
    if (status == IDIST_OK && !all) status = idist__ipc_setup_strand_all(g, setup);

    return status == IDIST_OK && !all ? idist__ipc_setup_without(g, reason) : status;
}

// Sets up the arenas of a group; if a rank cannot, the group is staged. All members call it.
// Releases the lock meanwhile.
static idist_status idist__ipc_setup_prepare(idist_group *g) {
    idist__world *w = g->w;
    idist__gpu *gpu = idist__gpu_of(w);
    idist__ipc_setup setup;
    idist_status status = IDIST_ERR_NO_MEMORY;

    memset(&setup, 0, sizeof setup);
    setup.infos = (idist__ipc_rank_info *)idist__mem_alloc(&w->cfg.mem,
                                                           sizeof *setup.infos * (size_t)g->size);
    if (setup.infos) status = IDIST_OK;
    gpu->user_count++;
    idist__ipc_setup_own(g, &setup);
    status = idist__gpu_leave_goes_on(g, status);
    if (status == IDIST_OK) status = idist__ipc_setup_others(g, &setup);

    idist__os_mutex_unlock(&w->lock);
    setup.stuck = !idist__ipc_probe_free(&setup.probe);
    idist__world_lock(w);

    if (setup.stuck) {
        gpu->stuck = true;
        idist__ipc_arena_abandon(g);
    }

    status = idist__gpu_leave_goes_on(g, status);
    if (status == IDIST_OK) status = idist__ipc_setup_agree(g, &setup);
    idist__mem_free(&w->cfg.mem, setup.infos);
    gpu->user_count--;

    return status;
}

//------------------------------------------------------------------------------
// [ipc:call]  calls of ranks that read each other's device memory
// uses base:type kind model core:world gpu:types gpu:task ptx kernel
//
// All ranks of a host that share a GPU can read each other's device memory. Each rank has an arena
// that the others map. A chunk of a call is given, and then taken:
//
//     give      own contribution -> own arena      (device)
//     take      others' arenas -> receive buffer   (device: a reduction kernel, or copies)
//
// A large all_reduce is taken in two steps. First each rank takes the slice that it reduces for
// all:
//
//     give      all but the own slice -> own arena
//     take      own slice from the send buffer, the others' from their arenas
//                   -> own arena and receive buffer
//     collect   the slices that the others have reduced -> receive buffer
//
// For each byte of the message the device then reads and writes 2 (n - 1) / n, 1 + 2 / n and
// 2 (n - 1) / n bytes: 5 - 2 / n in all, of which 2 are unavoidable. Reaching 2 would take mapping
// the program's own buffers. But mapped memory must not be freed, and nobody tells idist when the
// program frees its own.
//
// The device's work for a call is cut into phases. A rank that has finished a phase meets the
// others (on the host, where the first meeting compares the call), so that what is given in one
// phase can be taken `depth` phases later:
//
//     phase      0      1      2      3      4      5      6         three chunks, depth 2
//     give       0      1      2
//     take                     0      1      2
//     collect                                0      1      2
//     met            0      1      2      3      4      5      6     the device has the next one
//
// Phase p begins when all ranks have met for phase p - depth. Chunk c is in slot c % 4 of the
// arena. A rank that gives chunk c + 4 there, in phase c + 4, knows that all ranks have finished at
// least phase c + 2, in which they took chunk c. A rank's own slice of the slot holds what it has
// reduced; that was collected in phase c + 4, before the rank reduces there again in phase c + 6. A
// single chunk needs no pipeline: its depth is 1. After the last phase the ranks meet as well, so
// that nobody reads an arena whose owner has finished the call.
//
// No kernel waits for another rank, so processes that share a GPU may take turns on it.
//
//     idist__gpu_engine_start          the call gets its fingerprint and enters the group's queue
//     idist__ipc_call_step           enqueues the next phases; starts a meeting when one has
//     finished idist__gpu_engine_part_done      the ranks have met; then the next
//     idist__ipc_call_step
//------------------------------------------------------------------------------

enum { IDIST__IPC_ELEMENT = 256 }; // bytes

// Whether IPC supports a call; the same on all ranks.
static bool idist__ipc_call_supports(const idist_group *g, const idist__call *c) {
    if (idist__kind_is_p2p(c->kind) || idist__kind_is_v(c->kind)) return false;
    if (c->kind == IDIST__SCAN || c->kind == IDIST__EXSCAN || c->kind == IDIST__BARRIER)
        return false;
    if (idist_dtype_size(c->dtype) > IDIST__IPC_ELEMENT) return false; // an arena holds many
    if (!idist__kind_reduces(c->kind)) return true;
    if (c->dtype < IDIST_F16 || c->dtype > IDIST_F64) return false;
    if (idist__gpu_task_op_is_premul(g, c))
        return c->dtype >= IDIST_F32; // 16 bits would be rounded twice

    return c->op <= IDIST_AVG;
}

static bool idist__ipc_call_is_large(const idist__task *t) {
    const idist__gpu_op *op = idist__gpu_op_of(t);
    if (op->call.kind != IDIST__ALL_REDUCE || t->group->size == 1) return false;
    return op->call.count * op->size > IDIST__IPC_SMALL;
}

// Where the slice begins that a rank reduces in a chunk of k elements. Slices are whole cache
// lines, and at the same place in all chunks of a call: a slice is given while that of the slot's
// previous chunk is collected.
static size_t idist__ipc_call_slice_begin(const idist__task *t, size_t k, int rank) {
    const idist__gpu_op *op = idist__gpu_op_of(t);
    size_t line = 128 / op->size, n = (size_t)t->group->size;
    size_t at = ((op->chunk_count + n - 1) / n + line - 1) / line * line * (size_t)rank;
    return at < k ? at : k;
}

// The first step of a premultiplied sum: each rank has a factor of its own.
static cudaError_t idist__ipc_call_premultiply(const idist__task *t, void *data, size_t count) {
    const idist_group *g = t->group;
    const idist__call *c = &idist__gpu_op_of(t)->call;

    if (!idist__kind_reduces(c->kind) || !idist__gpu_task_op_is_premul(g, c)) return cudaSuccess;
    return idist__ipc_kernel_scale(idist__gpu_of(g->w), data, count, c->dtype,
                                   idist__world_user_op(g, c)->factor,
                                   idist__gpu_group_of(g)->stream[IDIST__STREAM_OUT]);
}

// Gives a part of a large all_reduce: from the send buffer to the same place in the arena.
static cudaError_t idist__ipc_call_give_part(const idist__task *t, char *arena, const char *send,
                                             size_t begin, size_t end) {
    size_t size = idist__gpu_op_of(t)->size, count = end - begin;
    cudaStream_t stream = idist__gpu_group_of(t->group)->stream[IDIST__STREAM_OUT];
    char *to = arena + begin * size;
    cudaError_t error;

    if (!count) return cudaSuccess;
    error = idist__gpu_task_copy(to, 0, send + begin * size, 0, count, 1, size, stream);
    return error == cudaSuccess ? idist__ipc_call_premultiply(t, to, count) : error;
}

// Gives this rank's contribution to the chunk of k elements that begins at element `at`.
static cudaError_t idist__ipc_call_give(const idist__task *t, char *arena, size_t at, size_t k) {
    const idist_group *g = t->group;
    const idist__gpu_op *op = idist__gpu_op_of(t);
    const idist__call *c = &op->call;
    idist__gpu_shape shape = idist__gpu_task_shape_of(g, c);
    const void *buffer = c->kind == IDIST__BROADCAST ? c->recv : c->send;
    const char *from = (const char *)buffer + at * op->size;
    cudaStream_t stream = idist__gpu_group_of(g)->stream[IDIST__STREAM_OUT];
    cudaError_t error;

    if (idist__ipc_call_is_large(t)) {
        error = idist__ipc_call_give_part(t, arena, from, 0,
                                          idist__ipc_call_slice_begin(t, k, g->rank));
        if (error != cudaSuccess) return error;
        return idist__ipc_call_give_part(t, arena, from,
                                         idist__ipc_call_slice_begin(t, k, g->rank + 1), k);
    }

    if (c->kind == IDIST__BROADCAST) shape.send = c->root == g->rank;
    error = idist__gpu_task_copy(arena, k, from, c->count, k, shape.send, op->size, stream);

    return error == cudaSuccess ? idist__ipc_call_premultiply(t, arena, k * shape.send) : error;
}

// Takes this rank's slice of a large all_reduce, to its arena and its receive buffer. If the
// program's buffers are not aligned to 16 bytes, copying them first is faster.
static cudaError_t idist__ipc_call_take_slice(const idist__task *t, char *const *arena, size_t at,
                                              size_t k) {
    const idist_group *g = t->group;
    const idist__gpu_op *op = idist__gpu_op_of(t);
    const idist__call *c = &op->call;
    size_t begin = idist__ipc_call_slice_begin(t, k, g->rank);
    size_t count = idist__ipc_call_slice_begin(t, k, g->rank + 1) - begin;
    size_t offset = begin * op->size;
    const char *send = (const char *)c->send + at * op->size;
    char *out = arena[g->rank] + offset, *to = (char *)c->recv + at * op->size + offset;
    bool premul = idist__gpu_task_op_is_premul(g, c),
         aligned = (uintptr_t)to % IDIST__PTX_NBYTES == 0;
    cudaError_t error = cudaSuccess;
    idist__ptx_args args;

    memset(&args, 0, sizeof args);
    args.out = out;
    args.also = aligned ? to : NULL;
    args.count = count;
    if (premul || (uintptr_t)(send + offset) % IDIST__PTX_NBYTES)
        error = idist__ipc_call_give_part(t, arena[g->rank], send, begin, begin + count);
    else args.in[g->rank] = send + offset;

    if (error == cudaSuccess) error = idist__ipc_kernel_reduce(t, arena, offset, &args);
    if (error != cudaSuccess || aligned) return error;

    return idist__gpu_task_copy(to, 0, out, 0, count, 1, op->size,
                                idist__gpu_group_of(g)->stream[IDIST__STREAM_OUT]);
}

// Takes what this rank receives from the arenas of all ranks.
static cudaError_t idist__ipc_call_take(const idist__task *t, char *const *arena, size_t at,
                                        size_t k) {
    const idist_group *g = t->group;
    const idist__gpu_op *op = idist__gpu_op_of(t);
    const idist__call *c = &op->call;
    cudaStream_t stream = idist__gpu_group_of(g)->stream[IDIST__STREAM_OUT];
    char *to = (char *)c->recv + at * op->size;
    size_t row = (size_t)g->rank * k * op->size;
    bool root = c->root == g->rank;
    cudaError_t error = cudaSuccess;
    idist__ptx_args args;
    int i;

    if (idist__ipc_call_is_large(t)) return idist__ipc_call_take_slice(t, arena, at, k);
    memset(&args, 0, sizeof args);
    args.out = to;
    args.count = k;

    switch (c->kind) {
    case IDIST__ALL_REDUCE: return idist__ipc_kernel_reduce(t, arena, 0, &args);
    case IDIST__REDUCE: return root ? idist__ipc_kernel_reduce(t, arena, 0, &args) : cudaSuccess;
    case IDIST__REDUCE_SCATTER: return idist__ipc_kernel_reduce(t, arena, row, &args);
    case IDIST__BROADCAST:
        return root ? cudaSuccess
                    : idist__gpu_task_copy(to, k, arena[c->root], k, k, 1, op->size, stream);
    case IDIST__SCATTER:
        return idist__gpu_task_copy(to, k, arena[c->root] + row, k, k, 1, op->size, stream);
    case IDIST__GATHER:
        if (!root) return cudaSuccess;
        break;
    default: break;
    }

    if (c->kind != IDIST__ALL_TO_ALL) row = 0;
    for (i = 0; i < g->size && error == cudaSuccess; i++) // gather, all_gather, all_to_all
        error = idist__gpu_task_copy(to + (size_t)i * c->count * op->size, k, arena[i] + row, k, k,
                                     1, op->size, stream);

    return error;
}

// Collects the slices of a large all_reduce that the others have reduced.
static cudaError_t idist__ipc_call_collect(const idist__task *t, char *const *arena, size_t at,
                                           size_t k) {
    const idist__gpu_op *op = idist__gpu_op_of(t);
    char *to = (char *)op->call.recv + at * op->size;
    cudaStream_t stream = idist__gpu_group_of(t->group)->stream[IDIST__STREAM_OUT];
    cudaError_t error = cudaSuccess;
    int i;

    for (i = 0; i < t->group->size && error == cudaSuccess; i++) {
        size_t offset = idist__ipc_call_slice_begin(t, k, i) * op->size;
        size_t count =
            idist__ipc_call_slice_begin(t, k, i + 1) - idist__ipc_call_slice_begin(t, k, i);
        const char *from = arena[i] + offset;
        if (i == t->group->rank) continue;
        error = idist__gpu_task_copy(to + offset, 0, from, 0, count, 1, op->size, stream);
    }

    return error;
}

typedef enum idist__ipc_phase_step {
    IDIST__IPC_GIVE,
    IDIST__IPC_TAKE,
    IDIST__IPC_COLLECT
} idist__ipc_phase_step;

static size_t idist__ipc_call_depth(const idist__gpu_op *op) { return op->nchunks > 1 ? 2 : 1; }

// Enqueues one step of the next phase, if there is a chunk for it.
static cudaError_t idist__ipc_call_enqueue_step(const idist__task *t, idist__ipc_phase_step step) {
    const idist__gpu_group *gg = idist__gpu_group_of(t->group);
    const idist__gpu_op *op = idist__gpu_op_of(t);
    size_t behind = (size_t)step * idist__ipc_call_depth(op), nth = op->enqueued_count - behind;
    size_t at = nth * op->chunk_count, k, slot;
    char *arena[IDIST__IPC_RANKS];
    int i;

    if (op->enqueued_count < behind || nth >= op->nchunks) return cudaSuccess;
    if (idist__gpu_of(t->group->w)->closed) return cudaErrorNotPermitted;

    k = op->call.count - at < op->chunk_count ? op->call.count - at : op->chunk_count;
    slot = nth % IDIST__IPC_SLOTS * IDIST__IPC_CHUNK;
    for (i = 0; i < t->group->size; i++) arena[i] = gg->arena[i] + slot;
    if (step == IDIST__IPC_GIVE) return idist__ipc_call_give(t, arena[t->group->rank], at, k);
    if (step == IDIST__IPC_TAKE) return idist__ipc_call_take(t, arena, at, k);

    return idist__ipc_call_collect(t, arena, at, k);
}

// One step of the call at the head of its group's queue. enqueued_count phases are enqueued; for
// started_count of them the ranks have met, or are about to. False: it waits, or has failed.
static bool idist__ipc_call_step(idist__task *t) {
    idist__gpu_op *op = idist__gpu_op_of(t);
    size_t depth = idist__ipc_call_depth(op), lag = idist__ipc_call_is_large(t) ? 2 : 1;
    size_t nphases = op->nchunks + lag * depth, ahead;
    int step, last_step = idist__ipc_call_is_large(t) ? IDIST__IPC_COLLECT : IDIST__IPC_TAKE;
    cudaStream_t stream = idist__gpu_group_of(t->group)->stream[IDIST__STREAM_OUT];

    if (op->with_backend) return false;
    idist__gpu_task_set_waiting(t, true);

    if (op->state == IDIST__GPU_WAIT) {
        if (!idist__gpu_task_event_done(t, op->event)) return false;
        op->state = IDIST__GPU_MOVE;
    }

    ahead = op->started_count + depth < nphases ? op->started_count + depth : nphases;

    for (; op->enqueued_count < ahead && op->error == cudaSuccess; op->enqueued_count++) {
        for (step = IDIST__IPC_GIVE; step <= last_step && op->error == cudaSuccess; step++)
            op->error = idist__ipc_call_enqueue_step(t, (idist__ipc_phase_step)step);
        if (op->error == cudaSuccess)
            op->error = cudaEventRecord(op->slots[op->enqueued_count % 2].out, stream);
    }

    if (op->started_count == nphases) {
        idist__gpu_task_complete(t);
        return true;
    }

    if (!idist__gpu_task_event_done(t, op->slots[op->started_count % 2].out)) return false;
    op->started_count++;
    idist__gpu_task_start_barrier(t);

    return true;
}

//------------------------------------------------------------------------------
// [ipc:own]  device memory of this rank alone, for idist_train.h
// uses mutex fail model core:world core:call gpu:types device ptx kernel
//
// Everything is enqueued on a stream of the program's.
//------------------------------------------------------------------------------

typedef struct idist__own {
    idist__world *w;
    idist__gpu *gpu;
    idist__gpu_guard guard;
    cudaStream_t stream;
    cudaError_t error;
} idist__own;

// From here to idist__own_end the device of the group's world is the current one. kernels: loads
// them. The lock is not held meanwhile: allocating, and enqueuing on a full queue, may wait for the
// device. The end of the world waits for us.
static idist_status idist__own_begin(idist__own *own, const char *name, const idist_opts *o,
                                     bool kernels) {
    idist_group *g;
    idist_status status;

    memset(own, 0, sizeof *own);
    status = idist__call_enter(name, o->group, &g);
    if (status != IDIST_OK) return status;
    own->w = g->w;
    own->gpu = idist__gpu_of(g->w);
    own->stream = (cudaStream_t)o->stream;
    if (!own->gpu || !own->gpu->host_backend)
        status = idist__fail(IDIST_ERR_NO_DEVICE, "%s: %s", name, g->w->no_device);
    else if (g->w->thread_stops)
        status = idist__fail(IDIST_ERR_STATE, "%s: another thread closes the world", name);

    if (status == IDIST_OK) {
        own->gpu->user_count++;
        own->guard = idist__gpu_device_enter(own->gpu);
        if (kernels) own->error = idist__ipc_kernel_need(g->w);
    }

    idist__os_mutex_unlock(&own->w->lock);

    return status;
}

static idist_status idist__own_end(const idist__own *own, const char *name) {
    idist__gpu_device_leave(own->gpu, own->guard);
    idist__world_lock(own->w);
    own->gpu->user_count--;
    idist__os_mutex_unlock(&own->w->lock);
    return own->error == cudaSuccess ? IDIST_OK : idist__gpu_device_fail(name, own->error);
}

// from NULL: zeros.
IDIST__UNUSED static idist_status idist__own_copy(const char *name, const idist_opts *o, void *to,
                                                  const void *from, size_t nbytes) {
    idist__own own;
    idist_status status = idist__own_begin(&own, name, o, false);

    if (status != IDIST_OK) return status;
    own.error = from ? cudaMemcpyAsync(to, from, nbytes, cudaMemcpyDeviceToDevice, own.stream)
                     : cudaMemsetAsync(to, 0, nbytes, own.stream);
    return idist__own_end(&own, name);
}

// Allocates zeroed memory, freed with idist__own_free.
IDIST__UNUSED static idist_status idist__own_alloc(const char *name, const idist_opts *o, void **p,
                                                   size_t nbytes) {
    idist__own own;
    idist_status status = idist__own_begin(&own, name, o, false);

    *p = NULL;
    if (status != IDIST_OK) return status;
    own.error = cudaMalloc(p, nbytes ? nbytes : 1);
    if (own.error == cudaSuccess) own.error = cudaMemsetAsync(*p, 0, nbytes, own.stream);
    return idist__own_end(&own, name);
}

IDIST__UNUSED static void idist__own_free(void *p) {
    idist__gpu_home home;

    if (!p) return;
    idist__gpu_device_home_enter(&home);
    cudaFree(p);
    cudaGetLastError();
    idist__gpu_device_home_leave(&home);
}

// Checks that the rank has a device and, if asked, the kernels.
IDIST__UNUSED static idist_status idist__own_ready(const char *name, const idist_opts *o,
                                                   bool kernels) {
    idist__own own;
    idist_status status = idist__own_begin(&own, name, o, kernels);
    return status == IDIST_OK ? idist__own_end(&own, name) : status;
}

// Whether p is in device memory. Nothing is for a rank without a device.
IDIST__UNUSED static idist_status idist__own_holds(const char *name, const idist_opts *o,
                                                   const void *p, bool *holds) {
    idist__own own;
    idist_status status = idist__own_begin(&own, name, o, false);

    *holds = false;
    if (status != IDIST_OK) return status == IDIST_ERR_NO_DEVICE ? IDIST_OK : status;
    own.error = idist__gpu_device_owns_pointer(p, holds);
    return idist__own_end(&own, name);
}

// Multiplies F16, BF16, F32 or F64 by a factor. The data is aligned to an element.
IDIST__UNUSED static idist_status idist__own_scale(const char *name, const idist_opts *o,
                                                   void *data, size_t count, idist_dtype dtype,
                                                   double factor) {
    idist__own own;
    idist_status status = idist__own_begin(&own, name, o, true);

    if (status != IDIST_OK) return status;
    if (own.error == cudaSuccess)
        own.error = idist__ipc_kernel_scale(own.gpu, data, count, dtype, factor, own.stream);
    return idist__own_end(&own, name);
}

// Launches one of the kernels that pack.
IDIST__UNUSED static idist_status idist__own_pack(const char *name, const idist_opts *o, int kernel,
                                                  const idist__pack_args *args) {
    // Packing bytes takes a warp for each chunk.
    size_t nthreads = kernel == IDIST__PACK_BYTES ? args->padded_count / 32 : args->count;
    idist__own own;
    idist_status status = idist__own_begin(&own, name, o, true);

    if (status != IDIST_OK) return status;
    if (own.error == cudaSuccess && nthreads)
        own.error = idist__ipc_kernel_launch(own.gpu, kernel, args, nthreads, own.stream);

    return idist__own_end(&own, name);
}

#endif // IDIST__INSIDE_NCCL_H
