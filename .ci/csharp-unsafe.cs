// The part of System.Runtime.CompilerServices.Unsafe that protobuf's C# runtime needs: internal in Debian's Mono.
namespace System.Runtime.CompilerServices
{
    using System.Runtime.InteropServices;

    static class Unsafe
    {
        public static T ReadUnaligned<T>(ref byte source) where T : struct =>
            MemoryMarshal.Read<T>(MemoryMarshal.CreateReadOnlySpan(ref source, Marshal.SizeOf(typeof(T))));

        public static void WriteUnaligned<T>(ref byte target, T value) where T : struct =>
            MemoryMarshal.Write(MemoryMarshal.CreateSpan(ref target, Marshal.SizeOf(typeof(T))), ref value);

        public static ref B As<A, B>(ref A source) where A : struct where B : struct =>
            ref MemoryMarshal.Cast<A, B>(MemoryMarshal.CreateSpan(ref source, 1))[0];

        public static ref T Add<T>(ref T source, int count) =>
            ref MemoryMarshal.CreateSpan(ref source, count + 1)[count];

        public static ref byte AddByteOffset(ref byte source, IntPtr bytes) => ref Add(ref source, (int)bytes);

        public static ref char AddByteOffset(ref char source, IntPtr bytes) => ref Add(ref source, (int)bytes / 2);
    }
}
